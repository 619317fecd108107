"""What operators see of a run: metric definitions, the exporters, scrape targets."""

from sgt_ds.telemetry.exporter import Exporter
from sgt_ds.telemetry.metrics import METRICS, Metric
from sgt_ds.telemetry.peaks import peak_flops
from sgt_ds.telemetry.record import StepRecord
from sgt_ds.telemetry.server import Certificate
from sgt_ds.telemetry.targets import TargetGroup, targets

__all__ = [
    "METRICS",
    "Certificate",
    "Exporter",
    "Metric",
    "StepRecord",
    "TargetGroup",
    "peak_flops",
    "targets",
]
