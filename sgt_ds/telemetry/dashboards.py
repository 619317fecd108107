"""All dashboards that are shipped, and the command that writes them.

`python -m sgt_ds.telemetry.dashboards monitoring/grafana/dashboards`
"""

from __future__ import annotations

import sys
from pathlib import Path

from sgt_ds.files import write_text_atomically
from sgt_ds.telemetry.dashboard_cluster import CLUSTER_DASHBOARD
from sgt_ds.telemetry.dashboard_fleet import FLEET_DASHBOARD
from sgt_ds.telemetry.dashboard_growth import GROWTH_DASHBOARD
from sgt_ds.telemetry.dashboard_run import RUN_DASHBOARD
from sgt_ds.telemetry.grafana import Dashboard, as_text

DASHBOARDS: tuple[Dashboard, ...] = (
    FLEET_DASHBOARD,
    RUN_DASHBOARD,
    GROWTH_DASHBOARD,
    CLUSTER_DASHBOARD,
)


def write_dashboards(folder: Path) -> list[Path]:
    """Write each dashboard to `folder`, named after its uid. Returns the files."""
    files = [folder / f"{dashboard.uid}.json" for dashboard in DASHBOARDS]
    for file, dashboard in zip(files, DASHBOARDS, strict=True):
        write_text_atomically(file, as_text(dashboard))
    return files


if __name__ == "__main__":
    for written in write_dashboards(Path(sys.argv[1])):
        print(written)
