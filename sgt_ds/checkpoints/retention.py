"""Which checkpoints are kept when a new one has been written and verified. Knows no torch."""

from __future__ import annotations

import logging
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from sgt_ds.checkpoints.manifest import MANIFEST_NAME
from sgt_ds.checkpoints.reading import is_being_read
from sgt_ds.checkpoints.store import CheckpointInfo, list_checkpoints, point_latest
from sgt_ds.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept for good beside the newest checkpoint, which always stays.

    `last`: the youngest whole ones. `every`: those whose step it divides, forever; None: none.
    `best`: the whole one of lowest validation loss.
    """

    last: int = 3
    every: int | None = None
    best: bool = False


def settle(directory: Path, newest: Path, retention: Retention) -> None:
    """Let `latest` name the newest checkpoint, and remove those that `retention` does not keep.

    The end of a save, made up for where that was killed before. For one process alone. What fails
    is reported: the checkpoint is there, and nothing here is a reason to call it lost.
    """
    try:
        point_latest(directory, newest.name)
    except OSError as error:
        log.warning("%s: `latest` could not be moved (%s)", newest, error.strerror)
    try:
        rotate(directory, newest, retention)
    except (OSError, UserError) as error:
        log.warning("%s: older ones were not removed (%s)", newest, error)


def rotate(directory: Path, newest: Path, retention: Retention) -> list[Path]:
    """Remove what `retention` does not keep. Returns the removed.

    `newest`: the one just written and verified; it always stays. Damaged ones do not count as
    kept, and go when they are older than the youngest that stay. One that is being read stays
    until the next time. A folder that has gone in the meantime, is a link, or can't be removed,
    stops nothing.
    """
    found = list_checkpoints(directory)
    whole = [info for info in found if info.fault is None and info.path != newest]
    youngest = {newest} | {info.path for info in whole[: max(retention.last, 1) - 1]}
    oldest = max((index for index, info in enumerate(found) if info.path in youngest), default=-1)
    kept = _kept_for_good(found, retention)
    removed: list[Path] = []
    for info in found[oldest + 1 :]:
        if info.path in kept or info.path.is_symlink():
            continue
        if is_being_read(info.path):
            log.info("old checkpoint %s is being read and is kept until the next save", info.path)
            continue
        # The manifest goes first: what a kill leaves half-removed is not a checkpoint any more.
        try:
            (info.path / MANIFEST_NAME).unlink(missing_ok=True)
            shutil.rmtree(info.path)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("old checkpoint %s could not be removed (%s)", info.path, error.strerror)
            continue
        removed.append(info.path)
    return removed


def _kept_for_good(found: list[CheckpointInfo], retention: Retention) -> set[Path]:
    """Checkpoints that stay whatever their age; `found` is in order of age, newest first."""
    kept = set()
    if retention.every is not None:
        kept = {info.path for info in found if info.step % retention.every == 0}
    if retention.best:
        measured = [
            (info.validation_loss, age, info.path)
            for age, info in enumerate(found)
            if info.fault is None
            and info.validation_loss is not None
            and math.isfinite(info.validation_loss)
        ]
        kept |= {path for _, _, path in sorted(measured)[:1]}
    return kept
