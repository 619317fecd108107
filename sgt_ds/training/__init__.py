"""Training: the DeepSpeed engine, the loop, resuming, early stops, and the step benchmark.

Loaded part by part when first asked for: the bench needs no DeepSpeed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgt_ds.training.bench import Row, Setting, bench_as_json, bench_step
    from sgt_ds.training.build import build_trainer, run
    from sgt_ds.training.engine import Ranks, join_ranks, leave_ranks
    from sgt_ds.training.exporter_bench import ExporterBench, bench_exporter
    from sgt_ds.training.heartbeat import Heartbeat
    from sgt_ds.training.lost_peers import lost_peers_told
    from sgt_ds.training.rollback import RolledBack, roll_back
    from sgt_ds.training.roofline import Roofline, measure_roofline
    from sgt_ds.training.saving_bench import SavingBench, bench_saving
    from sgt_ds.training.trainer import Trainer

__all__ = [
    "ExporterBench",
    "Heartbeat",
    "Ranks",
    "RolledBack",
    "Roofline",
    "Row",
    "SavingBench",
    "Setting",
    "Trainer",
    "bench_as_json",
    "bench_exporter",
    "bench_saving",
    "bench_step",
    "build_trainer",
    "join_ranks",
    "leave_ranks",
    "lost_peers_told",
    "measure_roofline",
    "roll_back",
    "run",
]

_NEEDS_TORCH = {
    "ExporterBench": "exporter_bench",
    "Heartbeat": "heartbeat",
    "Ranks": "engine",
    "RolledBack": "rollback",
    "Roofline": "roofline",
    "Row": "bench",
    "SavingBench": "saving_bench",
    "Setting": "bench",
    "Trainer": "trainer",
    "bench_as_json": "bench",
    "bench_exporter": "exporter_bench",
    "bench_saving": "saving_bench",
    "bench_step": "bench",
    "build_trainer": "build",
    "join_ranks": "engine",
    "leave_ranks": "engine",
    "lost_peers_told": "lost_peers",
    "measure_roofline": "roofline",
    "roll_back": "rollback",
    "run": "build",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for."""
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NEEDS_TORCH[name]}"), name)
