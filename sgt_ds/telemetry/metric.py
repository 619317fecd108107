"""A row of the metric tables, and the values of their labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram", "info"]
Scope = Literal["run", "rank", "host"]

PHASES = ("warmup", "growing", "fixed")
RULES = ("activate", "deepen", "freeze", "stall")
# Causes of a stall as the journal words them; what a method of one's own adds counts as other.
STALL_REASONS = ("candidate gone", "no eligible layer", "not finite", "not measured", "other")
MARGIN_KINDS = ("layer", "head")
RUN_STATES = ("running", "completed", "stopped", "failed")
INFO_LABELS = (
    *("run", "method", "preset", "version", "config_hash", "world_size"),
    *("device", "python", "torch", "deepspeed"),
)
# What an update consists of, and what happens between two updates.
STEP_PARTS = (
    *("data", "forward", "backward", "reduce", "optimizer", "growth"),
    *("validation", "checkpoint"),
)

# Those in which a rank waits for no other; updates last equally long on all of them, however slow
# one is. Backward is none of them: ZeRO reduces full buckets within it, and there a quick rank waits.
OWN_PARTS = ("data", "forward")

# From a small model on one GPU (tens of milliseconds) to a large global batch on a few (minutes).
STEP_BUCKETS_SECONDS = (
    *(0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0),
    *(60.0, 90.0, 120.0, 180.0, 300.0, 600.0),
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `scope`: who serves it. `run`: global rank 0 alone; `rank`: every rank;
    `host`: local rank 0 of every host.
    """

    name: str
    kind: Kind
    unit: str
    scope: Scope
    help: str
    labels: tuple[str, ...] = ()
