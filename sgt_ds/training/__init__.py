"""Training: the DeepSpeed engine, the loop, resuming, and what ends a run early."""

from sgt_ds.training.build import build_trainer, run
from sgt_ds.training.engine import Ranks, join_ranks, leave_ranks
from sgt_ds.training.resume import restore
from sgt_ds.training.run_directory import check_run_directory
from sgt_ds.training.trainer import Trainer

__all__ = [
    "Ranks",
    "Trainer",
    "build_trainer",
    "check_run_directory",
    "join_ranks",
    "leave_ranks",
    "restore",
    "run",
]
