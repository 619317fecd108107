"""All dashboards that are shipped, and the command that writes them.

`python -m sgt_ds.telemetry.dashboards monitoring/grafana/dashboards`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sgt_ds.errors import UserError, refusal
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
    """Write each dashboard to `folder`, named after its uid. Returns the files.

    Raises: UserError where that cannot be written.
    """
    files = [folder / f"{dashboard.uid}.json" for dashboard in DASHBOARDS]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, dashboard in zip(files, DASHBOARDS, strict=True):
            write_text_atomically(file, as_text(dashboard))
    except OSError as error:
        message = refusal(error, "written", instead="name another folder")
        raise UserError(folder, None, message) from None
    return files


def main(arguments: Sequence[str] | None = None) -> int:
    """Write them where the first argument says."""
    parser = argparse.ArgumentParser(
        prog="python -m sgt_ds.telemetry.dashboards", description="Write all dashboards as JSON."
    )
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="folder to write to; created if missing"
    )
    options = parser.parse_args(arguments)
    try:
        for written in write_dashboards(options.folder):
            print(written)
    except UserError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
