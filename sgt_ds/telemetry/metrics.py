"""Every metric that the exporters serve, in one table: name, type, unit, labels, meaning.

The exporter, the reference page and the tests read it. Knows no server and no run.
"""

from __future__ import annotations

from sgt_ds.telemetry.metric import Metric
from sgt_ds.telemetry.metrics_rank import RANK_METRICS
from sgt_ds.telemetry.metrics_run import RUN_METRICS

METRICS: tuple[Metric, ...] = (*RUN_METRICS, *RANK_METRICS)

BY_NAME = {metric.name: metric for metric in METRICS}
