"""What operators see of a run: metric definitions, the exporters, scrape targets."""

from sgt_ds.telemetry import heartbeats
from sgt_ds.telemetry.certificate import Certificate, check_pem
from sgt_ds.telemetry.credentials import read_password
from sgt_ds.telemetry.example import full_record
from sgt_ds.telemetry.exporter import Exporter
from sgt_ds.telemetry.hardware import HardwareSampler
from sgt_ds.telemetry.metric import OWN_PARTS, STEP_PARTS, Metric
from sgt_ds.telemetry.metrics import METRICS
from sgt_ds.telemetry.outcome import (
    Outcome,
    read_outcome,
    remove_outcome,
    stopped_as_requested,
    write_outcome,
)
from sgt_ds.telemetry.peaks import peak_flops
from sgt_ds.telemetry.record import StepRecord, Totals
from sgt_ds.telemetry.server import TIMEOUT_HEADER
from sgt_ds.telemetry.snapshot import DeviceMemory
from sgt_ds.telemetry.targets import TargetGroup, beyond_loopback, own_target, targets
from sgt_ds.telemetry.trackers import Tracker, check_trackers, tensorboard, wandb

__all__ = [
    "METRICS",
    "OWN_PARTS",
    "STEP_PARTS",
    "TIMEOUT_HEADER",
    "Certificate",
    "DeviceMemory",
    "Exporter",
    "HardwareSampler",
    "Metric",
    "Outcome",
    "StepRecord",
    "TargetGroup",
    "Totals",
    "Tracker",
    "beyond_loopback",
    "check_pem",
    "check_trackers",
    "full_record",
    "heartbeats",
    "own_target",
    "peak_flops",
    "read_outcome",
    "read_password",
    "remove_outcome",
    "stopped_as_requested",
    "targets",
    "tensorboard",
    "wandb",
    "write_outcome",
]
