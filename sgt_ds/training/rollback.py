"""Take a run back to an earlier checkpoint: what came after it is set aside, and nothing is deleted.

Knows no launcher. The next start resumes there by itself.
"""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sgt_ds import checkpoints
from sgt_ds.config import RunLayout
from sgt_ds.errors import UserError
from sgt_ds.files import atomic_writer
from sgt_ds.growth import Journal
from sgt_ds.training.run_directory import MetricsFile, only_trainer


@dataclass(frozen=True, slots=True)
class RolledBack:
    """What a rollback did. `set_aside`: the folder of what came later; None where nothing did.

    `checkpoint`: where the run goes on; `frozen_from`: the step from which its growth is frozen, if
    it is. `thawed`: whether an operator's freeze came later, and is taken back with its request.
    `moved`: the later checkpoints, where they lie now.
    """

    step: int
    checkpoint: Path
    frozen_from: int | None
    thawed: bool
    set_aside: Path | None
    moved: tuple[Path, ...]


def roll_back(run_dir: Path, step: int) -> RolledBack:
    """Make the run go on from its newest good checkpoint at or before `step`.

    Later checkpoints move to a folder laid out as a run directory, with a copy of journal and
    metrics, so that `growth show`, `growth diff`, `convert` and `fork` can still be given it; the
    run's own journal and metrics then end where it goes on.
    Raises: UserError where `run_dir` is no run, the run is alive, or no such checkpoint exists.
    """
    layout = RunLayout(run_dir)
    if not layout.config.exists():
        raise UserError(run_dir, None, "is no run directory; give the run_dir of a run")
    with only_trainer(run_dir):
        if layout.checkpoints.is_dir():
            # What a run that died while saving left could come back under its name later.
            checkpoints.remove_leftovers(layout.checkpoints)
        kept = checkpoints.checkpoint_until(layout.checkpoints, step)
        written = (layout.journal, layout.metrics)
        past = any(_reaches_past(path, kept.step) for path in written)
        frozen_from = checkpoints.read_state(kept.path).get("growth", {}).get("frozen_from")
        aside, moved = None, list[Path]()
        try:
            # A rollback that was killed before the cut has its copies already.
            if checkpoints.newer_than(kept) or (past and not _are_kept(written, layout.set_aside)):
                aside = RunLayout(_next_folder(layout.set_aside))
                for path in (layout.config, *written):
                    if path.exists():
                        _copy(path, aside.run_dir / path.name)
                moved = checkpoints.set_aside(kept, aside.checkpoints)
            thawed = _cut_back(layout, kept.step, frozen=frozen_from is not None)
        except OSError as error:
            raise UserError(
                run_dir, None, f"cannot be rolled back ({error.strerror}); free the disk, try again"
            ) from None
    where = aside.run_dir if aside else None
    return RolledBack(kept.step, kept.path, frozen_from, thawed, where, tuple(moved))


def _cut_back(layout: RunLayout, step: int, *, frozen: bool) -> bool:
    """Have journal and metrics end at `step`, as a resume from there would.

    `frozen`: whether growth is frozen there. Returns whether a later freeze is taken back.
    """
    thawed = False
    if layout.journal.exists():
        with Journal(layout.journal) as journal:
            thawed = journal.cut_back(step, frozen=frozen)
    if layout.metrics.exists():
        metrics = MetricsFile(layout.metrics)
        metrics.cut_back(step)
        metrics.close()
    if thawed:
        layout.freeze_request.unlink(missing_ok=True)
    return thawed


def _reaches_past(path: Path, step: int) -> bool:
    """Whether a file of JSON lines in order of steps holds lines past `step`."""
    if not path.exists():
        return False
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    try:
        return bool(lines) and int(json.loads(lines[-1]).get("step", -1)) > step
    except (ValueError, AttributeError, TypeError):
        return True  # torn: keep it


def _are_kept(files: Sequence[Path], parent: Path) -> bool:
    """Whether the newest folder of `parent` holds these very files."""
    folders = sorted(parent.iterdir()) if parent.is_dir() else []
    copies = [folders[-1] / path.name for path in files] if folders else []
    return bool(copies) and all(
        copy.exists() and filecmp.cmp(copy, path, shallow=False)
        for copy, path in zip(copies, files, strict=True)
        if path.exists()
    )


def _next_folder(parent: Path) -> Path:
    """A new folder: 001, 002, …"""
    parent.mkdir(exist_ok=True)
    number = 1 + max((int(old.name) for old in parent.iterdir() if old.name.isdecimal()), default=0)
    folder = parent / f"{number:03d}"
    folder.mkdir()
    return folder


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as read, atomic_writer(target) as written:
        shutil.copyfileobj(read, written)
