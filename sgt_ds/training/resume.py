"""Where a run starts: from scratch, from its own newest good checkpoint, or from a named one."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgt_ds import checkpoints
from sgt_ds.config import RunConfig, RunLayout
from sgt_ds.errors import UserError
from sgt_ds.files import writing
from sgt_ds.growth import averaged
from sgt_ds.training.engine import Ranks
from sgt_ds.training.trainer import Trainer

log = logging.getLogger(__name__)


def restore(trainer: Trainer, config: RunConfig, ranks: Ranks, *, resuming: bool) -> float | None:
    """Bring the trainer to where the run left off, or to the checkpoint that it forks from.

    `resuming`: whether the run directory held this run before. Returns the seconds that checking
    and loading took; None where the run starts from scratch. Collective.
    Raises: UserError where the checkpoint is damaged, missing, or of another run, architecture,
    data set or world size; or where the run has checkpoints and none is good.
    """
    started = time.perf_counter()
    path = _own_checkpoint(config, ranks, resuming)
    forking = path is None and config.fork is not None
    if forking:
        path = config.fork
        _begin_counting(trainer, None)  # events are counted anew, whatever the checkpoint holds
    if path is None:
        _cut_back(trainer, ranks, -1)
        _begin_counting(trainer, 0)
        return None
    found = not forking and path != config.resume
    state = _loaded(trainer, config, ranks, path, forking=forking, verified=found)
    _begin_counting(trainer, trainer.clock.step)
    _cut_back(trainer, ranks, -1 if forking else trainer.clock.step)
    if found:
        trainer.checkpoints.resumed(path)
    if forking:
        _fork_growth(trainer, path, state)
    else:
        _tell_missing_lines(trainer)
        _tell_float8(config.training.fp8, state, trainer.clock.step)
    seconds = time.perf_counter() - started
    if trainer.telemetry is not None:
        trainer.telemetry.publish_load(seconds)
    done = "forked from" if forking else "resumed"
    log.info("%s %s at step %d, in %.1f s", done, path, trainer.clock.step, seconds)
    return seconds


def _loaded(
    trainer: Trainer,
    config: RunConfig,
    ranks: Ranks,
    path: Path,
    *,
    forking: bool,
    verified: bool,
) -> Mapping[str, Any]:
    """Load a checkpoint into engine and trainer; returns what it holds beside the weights."""
    if forking:
        state = checkpoints.load_weights_only(trainer.engine, path, group=ranks.host_group)
    else:
        # A checkpoint that was looked for has been read whole; one that was named has not.
        state = checkpoints.load(trainer.engine, path, group=ranks.host_group, verified=verified)
    try:
        _check_counts(state)
        _check_data(trainer, config, path, state["data"])
        if forking:
            state["batches"] = _batches_of_fork(state, config.training.global_batch_size)
            state |= _without_events(state)
        trainer.load_state_dict(state)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        # All ranks read the same file, and meet the same error.
        raise UserError(
            path / checkpoints.STATE_NAME,
            None,
            f"does not hold what a run needs ({type(error).__name__}: {error}); "
            "use another checkpoint",
            everywhere=True,
        ) from None
    return state


def _without_events(state: Mapping[str, Any]) -> dict[str, Any]:
    """What of a parent's state counts its skips, decisions and faults: a fork has had none.

    Its totals of updates, tokens and FLOPs stay: the weights have cost them.
    """
    growth = {**state["growth"], "not_finite": 0}
    return {"skipped_steps": 0, "growth": growth, "telemetry": {}}


def _begin_counting(trainer: Trainer, step: int | None) -> None:
    """Let the exporter serve counters of events; with `step`, of updates too."""
    if trainer.telemetry is not None:
        trainer.telemetry.begin(step)


def _batches_of_fork(state: Mapping[str, Any], batch_size: int) -> int:
    """Global batches of this run's size that hold what the parent read.

    Rounded up: fewer sequences than a batch are left out, and none is read twice.
    """
    batches: int = state["batches"]
    try:
        parent_size = int(state["config"]["training"]["global_batch_size"])
    except (KeyError, TypeError, AttributeError):  # of something else than a run
        return batches
    return -(-batches * parent_size // batch_size)


def _tell_float8(now: bool, state: Mapping[str, Any], step: int) -> None:
    """Warn where the updates up to `step` were computed otherwise: a resume may change that.

    The checkpoint tells it: unlike the record of starts, it comes along from another directory.
    """
    try:
        before = bool(state["config"]["training"].get("fp8", False))  # older versions had no float8
    except (KeyError, TypeError, AttributeError):
        return
    if now is not before:
        log.warning("training.fp8: %s from step %d on, unlike before", f"{now}".lower(), step)


def _cut_back(trainer: Trainer, ranks: Ranks, step: int) -> None:
    """Drop what the run's files hold past `step`. Collective."""

    def cut() -> None:
        with writing(trainer.config.run_dir):
            trainer.cut_back(step)

    ranks.on_main(cut)


def _tell_missing_lines(trainer: Trainer) -> None:
    """Say where the journal does not lead to where the run is; a replay would be wrong."""
    step, journal = trainer.clock.step, trainer.growth.journal
    try:
        if journal is None or not trainer.growth.note_missing_lines(step, trainer.flops.total):
            return
    except UserError as error:
        log.warning("%s", error)
        return
    what = "is missing; a new journal starts" if journal.is_new else "lacks lines; it goes on"
    log.warning(
        "%s %s at step %d without the whole history of its growth. If you have a copy, stop, "
        "restore it and resume",
        journal.path,
        what,
        step,
    )


def _check_counts(state: Mapping[str, Any]) -> None:
    for key in ("step", "tokens", "batches", "skipped_steps"):
        if type(state[key]) is not int or not 0 <= state[key] < 2**63:
            raise ValueError(f"{key} is not a whole number below 2^63")


def _check_data(trainer: Trainer, config: RunConfig, path: Path, before: Mapping[str, Any]) -> None:
    differences = trainer.loader.differences(before)
    if not differences:
        return
    what = "; ".join(differences)
    if not config.data.accept_changed:
        raise UserError(
            path,
            "data",
            f"is not what this run reads: {what}; restore the data, or set "
            "data.accept_changed=true",
        )
    log.warning("data.accept_changed: continuing with changed data: %s", what)


def _own_checkpoint(config: RunConfig, ranks: Ranks, resuming: bool) -> Path | None:
    layout = RunLayout(config.run_dir)
    directory = layout.checkpoints
    # As with `fork`: once a run has checkpoints of its own it continues from them.
    if isinstance(config.resume, Path) and (
        config.resume.resolve().parent == directory.resolve() or not layout.has_checkpoints()
    ):
        return config.resume
    if not resuming:
        return None
    found = checkpoints.newest_good_for_all(directory, group=ranks.host_group)
    return None if found is None else found.path


def _fork_growth(trainer: Trainer, path: Path, state: Mapping[str, Any]) -> None:
    """The parent's entropies with this run's own policy, as if it had grown so all along.

    They are averaged anew: the parent may have had another `entropy_ema`.
    """
    if loops := state["state"]["loops"]:
        log.warning(
            "fork: the loops of %s (layers %s) are not carried over; growth starts from scratch",
            path,
            ", ".join(sorted(loops, key=int)),
        )
    growth: Mapping[str, Any] = state["growth"]

    def inherited() -> Mapping[str, Any]:
        journal, parent = trainer.growth.journal, RunLayout(path.resolve().parent.parent).journal
        if journal is None:
            return growth
        with writing(journal.path):
            measured = journal.adopt(parent, trainer.clock.step)
        ema = trainer.config.growth.entropy_ema
        return {**growth, **averaged(measured, ema)} if measured else growth

    trainer.growth.fork(trainer.ranks.from_main(inherited))
    # A window that falls on the very step of the fork is decided before the next update.
    trainer.decide()
