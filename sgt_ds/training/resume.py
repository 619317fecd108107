"""Where a run starts: anew, from its own newest good checkpoint, or from one that is named."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sgt_ds import checkpoints
from sgt_ds.config import ModelConfig, RunConfig, RunLayout, config_hash
from sgt_ds.errors import UserError
from sgt_ds.training.engine import Ranks
from sgt_ds.training.trainer import Trainer

log = logging.getLogger("sgt_ds")


class RunCheckpoints:
    """The checkpoints of one run, with the facts that conversion needs beside the trainer's state."""

    def __init__(
        self, config: RunConfig, ranks: Ranks, engine: Any, *, tokenizer: Path | None
    ) -> None:
        self._config, self._ranks, self._engine = config, ranks, engine
        self._directory = RunLayout(config.run_dir).checkpoints
        self._facts = {
            "model": config.model.model_dump(mode="json"),
            "method": config.method,
            "entry": config.growth.entry,
            "interval": config.growth.interval,
            "sequence_length": config.data.sequence_length,
            "tokenizer": None if tokenizer is None else str(tokenizer.resolve()),
            "config": config.model_dump(mode="json"),
            "config_hash": config_hash(config),
        }

    def save(self, step: int, state: dict[str, Any]) -> float:
        """Save a checkpoint of all ranks. Returns seconds. Collective."""
        started = time.perf_counter()
        checkpoints.save(
            self._engine,
            self._directory,
            step=step,
            state={**self._facts, "state": state["growth"]["state"], **state},
            keep_last=self._config.checkpoint.keep_last,
            group=self._ranks.host_group,
        )
        return time.perf_counter() - started

    def newest(self) -> str:
        """The newest good checkpoint's path, for a message."""
        found = checkpoints.newest_good(self._directory)
        return "none" if found is None else str(found.path)


def restore(trainer: Trainer, config: RunConfig, ranks: Ranks, *, resuming: bool) -> None:
    """Bring the trainer to where the run left off, or to the checkpoint that the run forks from.

    `resuming`: whether the run directory held this run before. Collective.
    Raises: UserError where the checkpoint is damaged, missing, or of another run or architecture.
    """
    path = _agree(lambda: _starting_point(config, resuming), ranks)
    if path is None:
        _cut_back(trainer, -1)
        return
    _check_architecture(path, config.model)
    state = checkpoints.load(trainer.engine, path, group=ranks.host_group)
    if state["data_fingerprint"] != trainer.loader.fingerprint:
        raise UserError(
            path, "data_fingerprint", "the data sets changed since this checkpoint; restore them"
        )
    forking = config.fork is not None and path == config.fork
    if forking:
        initial = trainer.growth.policy.initial_state()
        state["growth"] = {**state["growth"], "state": initial.as_json()}
    trainer.load_state_dict(state)
    _cut_back(trainer, trainer.clock.step)
    log.info("%s from %s, step %d", "forked" if forking else "resumed", path, trainer.clock.step)


def _starting_point(config: RunConfig, resuming: bool) -> Path | None:
    if isinstance(config.resume, Path):
        return config.resume
    directory = RunLayout(config.run_dir).checkpoints
    if resuming:
        found = checkpoints.newest_good(directory)
        if found is not None:
            return found.path
        if checkpoints.list_checkpoints(directory):
            raise UserError(
                directory,
                None,
                "holds no good checkpoint (see `sgt-ds checkpoint verify`); restore one, or choose "
                "another run_dir to start anew",
            )
    return config.fork


def _check_architecture(path: Path, model: ModelConfig) -> None:
    faults = checkpoints.verify(path)
    if faults:
        raise UserError(path, None, f"is damaged: {faults[0]}; choose another checkpoint")
    saved = checkpoints.read_state(path)["model"]
    for key, value in model.model_dump(mode="json").items():
        if saved.get(key) != value:
            raise UserError(
                path,
                f"model.{key}",
                f"is {saved.get(key)}, the run configuration says {value}; a checkpoint of another "
                "architecture cannot be loaded",
            )


def _agree(choose: Callable[[], Path | None], ranks: Ranks) -> Path | None:
    """What rank 0 chooses, on every rank; an error of its is raised on every rank."""
    box: list[Any] = [None]
    if ranks.is_main:
        try:
            box[0] = choose()
        except UserError as error:
            box[0] = error
    dist.broadcast_object_list(box, src=0, group=ranks.host_group)
    if isinstance(box[0], UserError):
        raise box[0]
    return box[0]  # type: ignore[no-any-return]


def _cut_back(trainer: Trainer, step: int) -> None:
    if trainer.growth.journal is not None:
        trainer.growth.journal.cut_back(step)
    if trainer.metrics is not None:
        trainer.metrics.cut_back(step)

