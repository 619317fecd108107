"""Go back to an older checkpoint: newer ones leave the folder intact, so no resume takes them.

Knows no run directory and no trainer. For a run that is not being trained.
"""

from __future__ import annotations

from pathlib import Path

from sgt_ds.checkpoints import store
from sgt_ds.checkpoints.store import CheckpointInfo
from sgt_ds.errors import UserError
from sgt_ds.files import fsync_directory


def checkpoint_until(directory: Path, step: int) -> CheckpointInfo:
    """The newest good checkpoint at or before `step`; every file of it is read.

    Raises: UserError where there is none.
    """
    found = store.newest_good(directory, until=step)
    if found is None:
        there = sorted(info.step for info in store.list_checkpoints(directory))
        have = "there is none at all"
        if there:
            late = there[0] > step
            have = f"the oldest is at step {there[0]}" if late else "those there are damaged"
        raise UserError(
            directory, f"--to {step}", f"no good checkpoint at or before that step; {have}"
        )
    return found


def newer_than(kept: CheckpointInfo) -> list[CheckpointInfo]:
    """What a resume could take before `kept`, or a history that went on behind it; newest first."""
    return [
        info
        for info in store.list_checkpoints(kept.path.parent)
        if info.step > kept.step or info.sequence > kept.sequence
    ]


def set_aside(kept: CheckpointInfo, into: Path) -> list[Path]:
    """Move what `newer_than` names to the folder `into`. Returns where each one lies now.

    A kill in between leaves every checkpoint whole, in one folder or the other; do it again then.
    Raises: OSError where the disk refuses.
    """
    directory = kept.path.parent
    into.mkdir(parents=True, exist_ok=True)
    moved = []
    for info in newer_than(kept):
        moved.append(info.path.rename(into / info.path.name))
        fsync_directory(into)
        fsync_directory(directory)
    store.point_latest(directory, kept.path.name)
    return moved
