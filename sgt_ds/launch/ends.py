"""How a launch ended: by its exit status, its ranks' signs, what rank 0 wrote, and checkpoints."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import NamedTuple

from sgt_ds.checkpoints import list_checkpoints
from sgt_ds.config import RunConfig, RunLayout
from sgt_ds.errors import UserError
from sgt_ds.launch.command import Target
from sgt_ds.launch.watch import Watch
from sgt_ds.telemetry import Outcome, heartbeats, stopped_as_requested

BAD_INPUT = UserError.exit_code


class End(NamedTuple):
    """How one launch ended, as in `Outcome`."""

    status: int
    reason: str
    data_end_step: int | None = None


class Deaths(NamedTuple):
    """Which ranks fell, in words, '' where none is known to have; whether this launch's own did."""

    told: str = ""
    own: bool = False


def last_checkpoint(run_dir: Path) -> str:
    """Where a run that ended can continue, for a message."""
    step = newest_step(RunLayout(run_dir))
    return f"last checkpoint: step {step}" if step >= 0 else "no checkpoint was saved"


def newest_step(layout: RunLayout) -> int:
    """Step of the newest checkpoint that looks whole; -1 without one, or where none can be read."""
    try:
        found = list_checkpoints(layout.checkpoints)
    except (OSError, UserError):
        return -1
    return next((info.step for info in found if info.fault is None), -1)


def judge(
    config: RunConfig,
    returncode: int,
    orphans: int,
    deaths: Deaths,
    told: Outcome | None,
    *,
    stopping: bool,
) -> End:
    """How a launch ended that ended by itself.

    `told`: the end that rank 0 wrote down once all ranks had saved: nothing that happened to them
    after it has lost anything.
    """
    run_dir, steps = config.run_dir, config.training.steps
    step = max(newest_step(RunLayout(run_dir)), 0)
    ended_well = told is not None and told.status == 0
    is_over = step >= steps or ended_well
    if returncode == BAD_INPUT:
        failed = f"the run failed with status {returncode}; {last_checkpoint(run_dir)}"
        return End(BAD_INPUT, failed)
    if not ended_well and (returncode or orphans or (deaths.own and not is_over)):
        cause = "it" if not returncode else f"it exited with status {returncode}"
        if returncode < 0:
            cause = f"its launcher was {heartbeats.killed_by(-returncode)}"
        elif orphans and not returncode:
            cause = "its launcher exited before its ranks"
        return End(1, f"the run failed: {deaths.told or cause}; {last_checkpoint(run_dir)}")
    if told is not None and ended_well:  # it knows more than the checkpoints tell
        return End(0, told.reason, told.data_end_step)
    if stopping:
        return End(0, stopped_as_requested(step, steps))
    if not is_over:
        # DeepSpeed's launcher returns 0 where a part of it was killed.
        return End(1, f"the run ended at step {step} of {steps} without being asked to stop")
    return End(0, f"complete at step {step}")


def deaths_of(watch: Watch, target: Target, returncode: int | None) -> Deaths:
    """Where none of this launch's ranks fell, those of other hosts' launches that seem to have.

    They may live: this one can't ask for their processes, and a rank that ended well may wait for
    its scrapers.
    """
    number = _signal_told(target, returncode)
    own = watch.deaths(number, among=target.launched_ranks)
    return Deaths(own or watch.deaths(number), own=bool(own))


def _signal_told(target: Target, status: int | None) -> int:
    """What ended the first rank by mpirun's exit status; 0 where it doesn't tell.

    Under the other launchers `node` writes it down, with the rank.
    """
    number = (status or 0) - 128
    # Ranks that were asked to end exit so themselves.
    told = 0 < number < signal.NSIG and number not in (signal.SIGINT, signal.SIGTERM)
    return number if target.launcher == "openmpi" and told else 0
