"""Where a run starts: anew, from its own newest good checkpoint, or from one that is named."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgt_ds import checkpoints
from sgt_ds.config import RunConfig, RunLayout, config_hash
from sgt_ds.errors import UserError
from sgt_ds.training.engine import Ranks
from sgt_ds.training.trainer import Trainer

log = logging.getLogger("sgt_ds")


class RunCheckpoints:
    """The checkpoints of one run, with the facts that conversion needs beside the trainer's state.

    `tokenizer`: the file that turns the model's ids into text, for an export.
    """

    def __init__(self, config: RunConfig, ranks: Ranks, engine: Any, *, tokenizer: Path) -> None:
        self._keep_last, self._group, self._engine = (
            config.checkpoint.keep_last,
            ranks.host_group,
            engine,
        )
        self._directory = RunLayout(config.run_dir).checkpoints
        self._facts = {
            "model": config.model.model_dump(mode="json"),
            "method": config.method,
            "interval": config.growth.interval,
            "sequence_length": config.data.sequence_length,
            "tokenizer": str(tokenizer.resolve()),
            "config": config.model_dump(mode="json"),
            "config_hash": config_hash(config),
        }

    def save(self, step: int, state: Mapping[str, Any]) -> float:
        """Save a checkpoint of all ranks. Returns seconds. Collective.

        Raises: SaveFailed on all ranks where one failed; earlier checkpoints stay as they are.
        """
        started = time.perf_counter()
        checkpoints.save(
            self._engine,
            self._directory,
            step=step,
            state={**self._facts, **state},
            keep_last=self._keep_last,
            group=self._group,
        )
        return time.perf_counter() - started

    def newest(self) -> str:
        """The newest good checkpoint's path, for a message."""
        found = checkpoints.newest_good(self._directory)
        return "none" if found is None else str(found.path)


def restore(trainer: Trainer, config: RunConfig, ranks: Ranks, *, resuming: bool) -> None:
    """Bring the trainer to where the run left off, or to the checkpoint that it forks from.

    `resuming`: whether the run directory held this run before. Collective.
    Raises: UserError where the checkpoint is damaged, missing, or of another run, architecture,
    data set or world size; or where the run has checkpoints and none is good.
    """
    path = _own_checkpoint(config, ranks, resuming)
    forking = path is None and config.fork is not None
    if forking:
        path = config.fork
    if path is None:
        trainer.cut_back(-1)
        return
    load = checkpoints.load_weights_only if forking else checkpoints.load
    state = load(trainer.engine, path, group=ranks.host_group)
    _check_data(trainer, config, path, state["data"])
    trainer.load_state_dict(state)
    trainer.cut_back(-1 if forking else trainer.clock.step)
    if forking:
        _fork_growth(trainer, path, state["growth"])
    log.info("%s %s at step %d", "forked from" if forking else "resumed", path, trainer.clock.step)


def _check_data(trainer: Trainer, config: RunConfig, path: Path, before: Mapping[str, Any]) -> None:
    differences = trainer.loader.differences(before)
    if not differences:
        return
    what = "; ".join(differences)
    if not config.data.accept_changed:
        raise UserError(
            path,
            "data",
            f"is not what this run reads: {what}; restore the data, or say data.accept_changed=true",
        )
    log.warning("data.accept_changed: going on with other data: %s", what)


def _own_checkpoint(config: RunConfig, ranks: Ranks, resuming: bool) -> Path | None:
    if isinstance(config.resume, Path):
        return config.resume
    if not resuming:
        return None
    directory = RunLayout(config.run_dir).checkpoints
    found = checkpoints.newest_good_for_all(directory, group=ranks.host_group)
    return None if found is None else found.path


def _fork_growth(trainer: Trainer, path: Path, growth: Mapping[str, Any]) -> None:
    """The parent's entropies with this run's own policy, as if it had grown so all along."""
    trainer.growth.fork(growth)
    if trainer.growth.journal is not None:
        parent = RunLayout(path.resolve().parent.parent).journal
        trainer.growth.journal.adopt(parent, trainer.clock.step)
    # A window that falls on the very step of the fork is decided before the next update.
    trainer.decide()
