"""One rank of a run in which a gradient is inf under a finite loss.

In the sixth update, on rank 1; where the data end, in that of the last batch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from sgt_ds.config import load_run_config, prepare_run_directory
from sgt_ds.training import Heartbeat, build_trainer, join_ranks, leave_ranks
from sgt_ds.training.run_directory import set_up_logging

arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
config = load_run_config(Path(arguments[0]), arguments[1:])
ranks = join_ranks(60)
ranks.on_main(lambda: prepare_run_directory(config, resuming=False))
set_up_logging(config.run_dir, ranks.rank)
heartbeat = Heartbeat(config.run_dir, ranks.rank, hang_seconds=60, patient_seconds=60)
trainer = build_trainer(config, ranks, arguments[0], heartbeat)


def poison(gradient: torch.Tensor) -> torch.Tensor:
    last = trainer.loader.last_batches
    sixth = ranks.rank == 1 and trainer.clock.step == 5 and trainer.skips.total == 0
    if sixth if last is None else trainer.loader.batches == last:
        gradient = gradient.clone()
        gradient.view(-1)[0] = float("inf")
    return gradient


trainer.engine.module.norm.weight.register_hook(poison)
trainer.train()
trainer.close()
leave_ranks()
