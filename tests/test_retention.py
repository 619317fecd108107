"""What stays when a new checkpoint is there: the last, every M-th, the best; and never the wrong one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgt_ds.checkpoints import (
    Retention,
    being_read,
    folder_name,
    list_checkpoints,
    newest_good,
    verify,
)
from sgt_ds.checkpoints.manifest import MANIFEST_NAME, Manifest, record_of, write_manifest
from sgt_ds.checkpoints.retention import rotate
from sgt_ds.checkpoints.store import next_sequence


def checkpoint(
    directory: Path, step: int, loss: float | None = None, age: int | None = None
) -> Path:
    """A folder that lists as a whole checkpoint."""
    folder = directory / folder_name(step)
    folder.mkdir(parents=True)
    (folder / "content").write_text(str(step))
    files = {"content": record_of(folder / "content")}
    write_manifest(folder, Manifest(step, step if age is None else age, 1, files, loss))
    return folder


def left(directory: Path) -> list[int]:
    return sorted(info.step for info in list_checkpoints(directory))


@settings(deadline=None, max_examples=60)
@given(
    losses=st.lists(st.none() | st.floats(0, 9), min_size=1, max_size=12),
    last=st.integers(1, 4),
    every=st.none() | st.integers(1, 5),
    best=st.booleans(),
)
def test_another_set_stays_than_the_three_rules_name(
    tmp_path_factory: pytest.TempPathFactory,
    losses: list[float | None],
    last: int,
    every: int | None,
    best: bool,
) -> None:
    """Rotated after each save, as in a run, and held to the rules read in the plainest way."""
    directory = tmp_path_factory.mktemp("run")
    for step, loss in enumerate(losses, start=1):
        newest = checkpoint(directory, step, loss)
        rotate(directory, newest, Retention(last, every, best))
    steps = range(1, len(losses) + 1)
    wanted = set(steps[-last:])
    if every is not None:
        wanted |= {step for step in steps if step % every == 0}
    measured = [(loss, -step) for step, loss in enumerate(losses, start=1) if loss is not None]
    if best and measured:
        wanted.add(-min(measured)[1])
    assert left(directory) == sorted(wanted)


def test_the_newest_is_removed_because_of_its_step_or_loss(tmp_path: Path) -> None:
    """A run that went back: the newest has a lower step than all others, and a worse loss."""
    for step in (10, 20, 30):
        checkpoint(tmp_path, step, loss=1.0)
    newest = checkpoint(tmp_path, 5, loss=9.0, age=99)
    removed = rotate(tmp_path, newest, Retention(1, None, best=False))
    assert left(tmp_path) == [5]
    assert len(removed) == 3


def test_a_loss_that_is_no_number_counts_as_the_best(tmp_path: Path) -> None:
    for step, loss in ((1, 3.0), (2, float("nan")), (3, float("-inf"))):
        newest = checkpoint(tmp_path, step, loss)
    rotate(tmp_path, newest, Retention(1, None, best=True))
    assert left(tmp_path) == [1, 3]


def test_damaged_ones_count_as_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        newest = checkpoint(tmp_path, step)
    for step in (1, 4, 5):
        (tmp_path / folder_name(step) / "content").unlink()
    rotate(tmp_path, newest, Retention(3))
    # Whole: 6, 3, 2. Of the damaged ones 5 and 4 are younger than 2; 1 is not.
    assert left(tmp_path) == [2, 3, 4, 5, 6]


def test_a_damaged_manifest_makes_the_newest_one_the_oldest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A resume says that it passes it over, and its rotation leaves it there."""
    for step in (1, 2, 3, 4, 5):
        checkpoint(tmp_path, step)
    for step in (2, 5):
        (tmp_path / folder_name(step) / MANIFEST_NAME).write_text("{")
    (tmp_path / folder_name(1) / MANIFEST_NAME).unlink()  # a rotation was killed here
    assert [info.step for info in list_checkpoints(tmp_path)] == [5, 4, 3, 2, 1]
    assert next_sequence(tmp_path) == 5
    assert newest_good(tmp_path) is None  # what is in them is no run's
    assert f"{folder_name(5)} is skipped: {MANIFEST_NAME}: line 1: is not valid" in caplog.text
    rotate(tmp_path, tmp_path / folder_name(4), Retention(2))
    assert left(tmp_path) == [3, 4, 5]


def test_a_checkpoint_is_removed_under_who_reads_it(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        newest = checkpoint(tmp_path, step)
    with being_read(tmp_path / folder_name(1)), being_read(tmp_path / folder_name(1)):
        rotate(tmp_path, newest, Retention(1))
        assert left(tmp_path) == [1, 3]
    rotate(tmp_path, newest, Retention(1))
    assert left(tmp_path) == [3]
    with being_read(tmp_path / folder_name(1)):  # gone: who reads it says so
        pass


def test_a_folder_that_has_gone_or_leads_elsewhere_stops_the_rotation_or_is_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, elsewhere = tmp_path / "checkpoints", tmp_path / "archive"
    moved = checkpoint(elsewhere, 1)
    for step in (2, 3, 4):
        newest = checkpoint(directory, step)
    (directory / moved.name).symlink_to(moved)
    remove = shutil.rmtree

    def gone_by_then(path: Path) -> None:
        remove(path)
        remove(path)  # somebody else was quicker

    monkeypatch.setattr(shutil, "rmtree", gone_by_then)
    rotate(directory, newest, Retention(1))
    assert [info.path.name for info in list_checkpoints(directory) if not info.fault] == [
        newest.name
    ]
    assert sorted(path.name for path in moved.iterdir()) == ["content", "manifest.json"]
    [link] = [info for info in list_checkpoints(directory) if info.fault]
    assert "is a link" in str(link.fault)
    # An operator names it: then it is what it leads to.
    assert "is a link" not in " ".join(verify(directory / moved.name))
