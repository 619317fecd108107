"""What operators see of a run: metric definitions, the exporters, scrape targets."""

from sgt_ds.telemetry.exporter import Exporter
from sgt_ds.telemetry.metrics import METRICS, Metric
from sgt_ds.telemetry.peaks import peak_flops
from sgt_ds.telemetry.record import StepRecord

__all__ = ["METRICS", "Exporter", "Metric", "StepRecord", "peak_flops"]
