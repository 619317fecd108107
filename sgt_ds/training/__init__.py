"""Training: the DeepSpeed engine, the loop, resuming, early stops, and the step benchmark.

Loaded part by part when first asked for: the bench needs no DeepSpeed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgt_ds.lazy import lazy_exports

if TYPE_CHECKING:
    from sgt_ds.training.bench import Row, Setting, bench_as_json, bench_step
    from sgt_ds.training.build import build_trainer, run
    from sgt_ds.training.engine import Ranks, join_ranks, leave_ranks
    from sgt_ds.training.exporter_bench import ExporterBench, bench_exporter
    from sgt_ds.training.heartbeat import Heartbeat
    from sgt_ds.training.kernel_parts import PARTS
    from sgt_ds.training.lost_peers import lost_peers_told
    from sgt_ds.training.rollback import RolledBack, roll_back
    from sgt_ds.training.roofline import Roofline, measure_roofline
    from sgt_ds.training.saving_bench import SavingBench, bench_saving
    from sgt_ds.training.step_profile import StepProfile, added, vanilla_of
    from sgt_ds.training.trainer import Trainer

__all__ = [
    "PARTS",
    "ExporterBench",
    "Heartbeat",
    "Ranks",
    "RolledBack",
    "Roofline",
    "Row",
    "SavingBench",
    "Setting",
    "StepProfile",
    "Trainer",
    "added",
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
    "vanilla_of",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "bench": ("Row", "Setting", "bench_as_json", "bench_step"),
        "build": ("build_trainer", "run"),
        "engine": ("Ranks", "join_ranks", "leave_ranks"),
        "exporter_bench": ("ExporterBench", "bench_exporter"),
        "heartbeat": ("Heartbeat",),
        "kernel_parts": ("PARTS",),
        "lost_peers": ("lost_peers_told",),
        "rollback": ("RolledBack", "roll_back"),
        "roofline": ("Roofline", "measure_roofline"),
        "saving_bench": ("SavingBench", "bench_saving"),
        "step_profile": ("StepProfile", "added", "vanilla_of"),
        "trainer": ("Trainer",),
    },
)
