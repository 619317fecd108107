"""Take a run back to an earlier checkpoint: later ones are set aside, and nothing is deleted.

Knows no launcher. The next start resumes there by itself.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sgt_ds import checkpoints
from sgt_ds.checkpoints import CheckpointInfo
from sgt_ds.config import RunLayout
from sgt_ds.errors import UserError, refusal
from sgt_ds.files import atomic_writer, truncate
from sgt_ds.growth import kept_part
from sgt_ds.telemetry import write_outcome
from sgt_ds.training.run_directory import kept_rows, only_trainer


@dataclass(frozen=True, slots=True)
class RolledBack:
    """What a rollback did. `set_aside`: the folder of what came later; None where nothing did.

    `checkpoint`: where the run goes on; `frozen_from`: the step from which its growth is frozen, if
    it is. `thawed`: whether an operator's freeze came later, and is taken back with its request.
    `moved`: the later checkpoints, where they lie now. `cut`: whether journal or metrics were cut.
    """

    step: int
    checkpoint: Path
    frozen_from: int | None
    thawed: bool
    set_aside: Path | None
    moved: tuple[Path, ...]
    cut: bool


def roll_back(run_dir: Path, step: int) -> RolledBack:
    """Make the run continue from its newest good checkpoint at or before `step`.

    Later checkpoints move to a folder laid out as a run directory, with a copy of journal and
    metrics, so that `growth show`, `growth diff`, `convert` and `fork` can still be given it; the
    run's own journal and metrics then end where it continues.
    Raises: UserError where `run_dir` is not a run, the run is alive, or no such checkpoint exists.
    """
    layout = RunLayout(run_dir)
    if not layout.config.exists():
        raise UserError(run_dir, None, "is not a run directory; give the run_dir of a run")
    with only_trainer(run_dir):
        if layout.checkpoints.is_dir():
            # What a run that died while saving left could come back under its name later.
            checkpoints.remove_leftovers(layout.checkpoints)
        kept = checkpoints.checkpoint_until(layout.checkpoints, step)
        growth = checkpoints.read_state(kept.path).get("growth")
        frozen_from = growth.get("frozen_from") if isinstance(growth, dict) else None
        try:
            cuts, thawed = _cuts(layout, kept.step, frozen=frozen_from is not None)
            aside, moved = _set_aside(layout, kept, cuts)
            if thawed:
                layout.freeze_request.unlink(missing_ok=True)
            for path, size in cuts.items():
                truncate(path, size)
            if cuts or moved:
                write_outcome(layout.control, 0, f"rolled back to step {kept.step}")
        except OSError as error:
            raise UserError(run_dir, None, refusal(error, "rolled back", "try again")) from None
    return RolledBack(kept.step, kept.path, frozen_from, thawed, aside, tuple(moved), bool(cuts))


def uncut_metrics(layout: RunLayout) -> Path:
    """The metrics of all that was trained: what a rollback set aside, until more is written."""
    furthest = layout.metrics
    if not furthest.exists():
        return furthest
    # Of rollbacks in a row, each one's copy is what the one before left.
    for _, folder in sorted(_folders(layout.set_aside).items(), reverse=True):
        if not _begins_with(folder / furthest.name, furthest):
            break
        furthest = folder / furthest.name
    return furthest


def _cuts(layout: RunLayout, step: int, *, frozen: bool) -> tuple[dict[Path, int], bool]:
    """Bytes that stay of each file that holds more than belongs to `step`; whether a freeze goes.

    `frozen`: whether growth is frozen there. The journal comes last: it tells of the freeze.
    """
    kept, thawed = {}, False
    if layout.metrics.exists():
        kept[layout.metrics] = kept_rows(layout.metrics, step)
    if layout.journal.exists():
        kept[layout.journal], thawed = kept_part(layout.journal, step, frozen=frozen)
    return {path: size for path, size in kept.items() if size < path.stat().st_size}, thawed


def _set_aside(
    layout: RunLayout, kept: CheckpointInfo, cut: Iterable[Path]
) -> tuple[Path | None, list[Path]]:
    """Copy run.yaml, journal and metrics, and move later checkpoints, to a folder of their own.

    Returns the folder, None where nothing came later or an earlier rollback, which was killed, has
    set it aside; and where the checkpoints lie now.
    """
    if not checkpoints.newer_than(kept) and _are_kept(cut, layout.set_aside):
        return None, []
    aside = RunLayout(_next_folder(layout.set_aside))
    for path in (layout.config, layout.journal, layout.metrics):
        if path.exists():
            _copy(path, aside.run_dir / path.name)
    return aside.run_dir, checkpoints.set_aside(kept, aside.checkpoints)


def _are_kept(files: Iterable[Path], parent: Path) -> bool:
    """Whether the newest folder of `parent` holds all of each of these files."""
    newest = _newest_folder(parent)
    return all(newest is not None and _begins_with(newest / path.name, path) for path in files)


def _folders(parent: Path) -> dict[int, Path]:
    """The numbered folders of `parent`: 001, 002, …"""
    there = parent.iterdir() if parent.is_dir() else ()
    return {int(folder.name): folder for folder in there if folder.name.isdecimal()}


def _newest_folder(parent: Path) -> Path | None:
    folders = _folders(parent)
    return folders[max(folders)] if folders else None


def _begins_with(copy: Path, path: Path) -> bool:
    if not copy.exists():
        return False
    with copy.open("rb") as long, path.open("rb") as short:
        while piece := short.read(1 << 20):
            if long.read(len(piece)) != piece:
                return False
    return True


def _next_folder(parent: Path) -> Path:
    parent.mkdir(exist_ok=True)
    folder = parent / f"{1 + max(_folders(parent), default=0):03d}"
    folder.mkdir()
    return folder


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as read, atomic_writer(target) as written:
        shutil.copyfileobj(read, written)
