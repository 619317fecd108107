"""Saving beside training: the same bytes, one at a time, and a failure that stops nothing else."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import IO, Any

import pytest
import runs
import torch
from forked import Nursery

from sgt_ds import files
from sgt_ds.checkpoints import (
    LATEST_NAME,
    list_checkpoints,
    payload,
    read_latest,
    read_manifest,
    read_state,
    verify,
)
from sgt_ds.checkpoints.contents import saved_sizes
from sgt_ds.checkpoints.snapshot import Snapshots
from sgt_ds.files import LineFile, output_writer, write_text_atomically
from sgt_ds.training.run_directory import set_up_logging

FAULTY = "faulty:main"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_data(tmp_path_factory.mktemp("data"))


def tensor_files(run_dir: Path) -> dict[tuple[int, str], str]:
    """Hash of every file of weights and optimizer of every checkpoint."""
    return {
        (info.step, name): record.xxh3
        for info in list_checkpoints(run_dir / "checkpoints")
        for name, record in read_manifest(info.path).files.items()
        if name.endswith(".pt")
    }


def state(run_dir: Path, step: int) -> dict[str, Any]:
    found = read_state(run_dir / "checkpoints" / f"step-{step:08d}")
    for key in ("config", "telemetry"):
        del found[key]
    return found


def test_training_goes_on_changing_what_is_still_being_written(
    tmp_path: Path, data: Path, nursery: Nursery
) -> None:
    """The disk is slower than an update: a save of every step must hold that step's numbers."""
    told = {}
    for name, background, fault in (
        ("beside", True, {"slow_disk": 0.5}),
        ("at-once", False, {}),
        ("no-memory", True, {"no_memory": {"rank": 1}, "no_rotation": True}),
    ):
        file = runs.write_run(
            tmp_path / f"{name}.yaml",
            data,
            training={"steps": 8},
            checkpoint={"every": 2, "keep_last": 9, "background": background},
        )
        log = tmp_path / f"{name}.log"
        told[name] = nursery.start(log, [json.dumps(fault), file], ranks=2, entry=FAULTY).end()
    beside, at_once = tmp_path / "beside", tmp_path / "at-once"
    assert tensor_files(beside) == tensor_files(at_once)
    assert len(tensor_files(beside)) == 4 * 3
    # Without memory for the copy on one rank, all write at once.
    assert tensor_files(tmp_path / "no-memory") == tensor_files(at_once)
    warnings = [line for line in told["no-memory"].splitlines() if "not enough memory" in line]
    assert len(warnings) == 4
    # Nor is one that is there called lost because older ones could not be removed.
    assert "was not saved" not in told["no-memory"]
    assert told["no-memory"].count("older ones were not removed") == 4
    assert "step 2: " in warnings[0]
    assert "(rank 1: " in warnings[0]
    assert state(beside, 6) == state(at_once, 6)
    assert runs.losses(beside) == runs.losses(at_once)
    assert not [path for path in (beside / "checkpoints").iterdir() if path.name[0] == "."]
    # It was written beside training: an update was reported between the beginning and the end.
    lines = told["beside"].splitlines()
    reported = [line.partition("  ")[0] for line in lines if line.startswith("step ")]
    saved = next(i for i, line in enumerate(reported) if line.startswith("step 2: checkpoint"))
    assert "step 3/8" in reported[:saved]
    # The next was due before: said once, and not where the end of the run waits anyway.
    (waited,) = [line for line in lines if "training waited" in line]
    assert "step 4: " in waited
    assert "the checkpoint of step 2" in waited
    assert "training waited" not in told["at-once"]


def test_a_full_disk_stops_more_than_the_saving(
    tmp_path: Path, data: Path, nursery: Nursery
) -> None:
    file = runs.write_run(
        tmp_path / "run.yaml",
        data,
        training={"steps": 12},
        checkpoint={"every": 3, "keep_last": 9},
    )
    fault = json.dumps({"full_disk": {"rank": 1, "steps": [4, 8]}})
    told = nursery.start(tmp_path / "log", [fault, file], ranks=2, entry=FAULTY).end()
    failures = [line for line in told.splitlines() if "was not saved" in line]
    assert len(failures) == 1, told
    assert "step-00000006 was not saved (rank 1: " in failures[0]
    assert "File too large" in failures[0]
    directory = tmp_path / "run" / "checkpoints"
    assert sorted(info.step for info in list_checkpoints(directory)) == [3, 9, 12]
    assert not [fault for info in list_checkpoints(directory) for fault in verify(info.path)]
    assert not list(directory.glob(".step-*"))
    last = read_state(directory / "step-00000012")
    assert last["telemetry"]["checkpoint_failures"] == 1
    assert sorted(runs.losses(tmp_path / "run")) == list(range(1, 13))


def test_the_last_save_fails_and_another_one_is_promised(
    tmp_path: Path, data: Path, nursery: Nursery
) -> None:
    file = runs.write_run(
        tmp_path / "run.yaml", data, training={"steps": 6}, checkpoint={"every": 3}
    )
    fault = json.dumps({"full_disk": {"rank": 1, "steps": [2, 99]}})
    told = nursery.start(tmp_path / "log", [fault, file], ranks=2, entry=FAULTY).end(expect=1)
    failures = [line for line in told.splitlines() if line.startswith("checkpoint: ")]
    assert [line.partition(" ")[2][:13] for line in failures] == ["step-00000003", "step-00000006"]
    assert ["retrying at the next" in line for line in failures] == [True, False]


def test_a_full_disk_of_rank_0_ends_the_run_or_tears_its_journal(
    tmp_path: Path, data: Path, nursery: Nursery
) -> None:
    """Neither journal nor metrics can grow for a while: lines wait, and no checkpoint is without."""
    for name, last in (("lifted", 9), ("stays", 99)):
        file = runs.write_run(
            tmp_path / f"{name}.yaml",
            data,
            training={"steps": 12, "validate_every": 3},
            checkpoint={"every": 3, "keep_last": 9},
        )
        fault = json.dumps({"full_disk": {"rank": 0, "steps": [4, last], "size": 2000}})
        ranks = nursery.start(tmp_path / f"{name}.log", [fault, file], ranks=2, entry=FAULTY)
        ranks.statuses()
        run_dir = tmp_path / name
        saved = sorted(info.step for info in list_checkpoints(run_dir / "checkpoints"))
        if name == "lifted":
            assert ranks.end()
            assert saved == [3, 9, 12]
        else:  # the last save is waited for, and fails; the next process goes on from step 3
            ranks.end(expect=1)
            assert saved == [3]
            assert [line for line in runs.journal_lines(run_dir) if line["step"] > 4] == []
            nursery.start(tmp_path / "again", [file], ranks=2).end()
        runs.check_replay(run_dir)
        assert sorted(runs.losses(run_dir)) == list(range(1, 13))
    lifted, again = tmp_path / "lifted", tmp_path / "stays"
    assert runs.journal_lines(lifted) == runs.journal_lines(again)
    assert runs.losses(lifted) == runs.losses(again)


def test_a_start_that_cannot_write_its_files_ends_in_a_traceback(
    tmp_path: Path, data: Path, nursery: Nursery
) -> None:
    """A resume on a full disk, for one; here what cannot be written is a folder."""
    file = runs.write_run(
        tmp_path / "run.yaml", data, training={"steps": 2}, checkpoint={"every": 9}
    )
    nursery.start(tmp_path / "first", [file]).end()
    for name in ("growth.jsonl", "metrics.jsonl", "logs/rank-00000.log"):
        path = tmp_path / "run" / name
        path.rename(tmp_path / "kept")
        path.mkdir()
        said = nursery.start(tmp_path / "log", [file]).end(expect=2)
        assert "Traceback" not in said
        assert (
            f"sgt-ds train: {path}: cannot be written (Is a directory); choose another run_dir"
            in said
        )
        path.rmdir()
        (tmp_path / "kept").rename(path)


def test_a_write_that_fails_is_told_of_a_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for name, reason in (
        ("file/x", "[Errno 20] Not a directory"),
        ("none/x", "[Errno 2] No such file or directory"),
        ("folder", "[Errno 21] Is a directory"),
    ):
        with pytest.raises(OSError) as caught:
            write_text_atomically(tmp_path / name, "text")
        assert str(caught.value) == f"{reason}: '{tmp_path / name}'"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_an_output_replaces_a_pipe_or_the_link_that_names_it(tmp_path: Path) -> None:
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "folder" / "file"
    os.mkfifo(pipe)
    file.parent.mkdir()
    link.symlink_to(file)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (pipe, link, link):  # a link to nothing yet, and one to a file
        with output_writer(path) as stream:
            stream.write(b"text")
    assert os.read(reader, 99) == b"text"
    os.close(reader)
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert file.read_text() == "text"
    with pytest.raises(ZeroDivisionError), output_writer(link):
        raise ZeroDivisionError
    assert file.read_text() == "text", "whole or not at all"
    assert [path.name for path in file.parent.iterdir()] == ["file"]


WRITING = """
import sys
from pathlib import Path
from sgt_ds.files import output_writer

with output_writer(Path(sys.argv[1])) as stream:
    stream.write(b"report, ")
print("done")
"""


@pytest.mark.parametrize(
    ("name", "mode", "kept"),
    [
        ("/dev/stdout", "a", "before, "),
        ("/dev/stdout", "w", ""),
        ("/proc/self/fd/1", "a", "before, "),
        ("link", "a", "before, "),
    ],
)
def test_an_output_replaces_the_file_that_stdout_goes_to(
    name: str, mode: str, kept: str, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to("/dev/stdout")
    file = tmp_path / "file"
    file.write_text("before, ")
    with file.open(mode) as stdout:
        command = [sys.executable, "-c", WRITING, name]
        subprocess.run(command, cwd=tmp_path, stdout=stdout, check=True)
    assert file.read_text() == f"{kept}report, done\n"


def test_an_output_replaces_the_file_of_another_descriptor(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before, ")
    with (
        (tmp_path / "file").open("a") as stream,
        output_writer(Path(f"/dev/fd/{stream.fileno()}")) as out,
    ):
        out.write(b"report")
    assert (tmp_path / "file").read_text() == "before, report"


def test_a_log_on_a_full_disk_is_longer_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    logger = set_up_logging(tmp_path, 0)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, usual[1]))
        for step in range(9):
            logger.info("step %d", step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
        logger.propagate = True
    assert capsys.readouterr().err == ""


def test_a_terminal_on_a_full_disk_is_told_of_more_than_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    full = Path("/dev/full").open("w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    logger = set_up_logging(tmp_path, 0)
    try:
        for step in range(9):
            logger.info("step %d", step)
        told = capsys.readouterr().err
        logger.info("step %d", "no number")  # a fault of the code stays one that is seen
    finally:
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            with suppress(OSError):
                handler.close()
        logger.propagate = True
        with suppress(OSError):
            full.close()
    assert told == "sgt-ds train: cannot write the log to stdout (No space left on device)\n"
    assert "TypeError" in capsys.readouterr().err
    assert "step 8" in (tmp_path / "logs" / "rank-00000.log").read_text()


def test_lines_that_wait_for_the_disk_are_torn_lost_or_told_of_each_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = LineFile(tmp_path / "lines")
    wanted = []
    try:
        for number in range(40):
            if number in (10, 30):  # in the middle of a line
                most = 255 if number == 10 else usual[0]
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, usual[1]))
            wanted.append(f"{number:>19}\n")
            lines.add(wanted[-1])
            lines.offer()
            whole = wanted[:12] if 12 <= number < 30 else wanted
            assert (tmp_path / "lines").read_text() == "".join(whole)
            assert (lines.fault is not None) == (12 <= number < 30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    lines.close()
    begun, ended = (record.getMessage() for record in caplog.records)
    assert "can't be written (File too large)" in begun
    assert "can be written again" in ended


def test_lines_are_lost_that_a_disk_took_and_refused_when_they_were_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lines"
    lines = LineFile(file)
    for number in range(3):
        lines.add(f"{number}\n")
        lines.offer(sync=number == 0)

    def full(_: int) -> None:
        file.write_bytes(file.read_bytes()[:3] + b"\0\0\0")  # the pages it dropped
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        lines.offer(sync=True)
        lines.offer()  # what the system only takes is not on the disk
        assert lines.fault == "lines: No space left on device"
    lines.add("3\n")
    lines.offer()
    assert lines.fault is None
    assert file.read_text() == "0\n1\n2\n3\n"
    lines.add("4\n")
    with monkeypatch.context() as patched:
        patched.setattr(files, "MAX_UNSYNCED_BYTES", 1)
        patched.setattr(os, "fsync", lambda _: (tmp_path / "nothing").stat())
        lines.close()  # what may be lost is still there for who reads now
    assert file.read_text() == "0\n1\n2\n3\n4\n"


def test_lines_are_synced_at_every_report_or_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(1))
    monkeypatch.setattr(files, "MAX_UNSYNCED_BYTES", 100)
    lines = LineFile(tmp_path / "lines")
    for _ in range(25):
        lines.add("123456789\n")
        lines.offer()
    assert len(synced) == 2  # of eleven lines each
    lines.offer(sync=True)
    assert len(synced) == 3
    lines.close()


@pytest.mark.parametrize("pieces", [[1000], [250] * 4, [64, 64, 872]])
def test_a_save_hands_the_disk_more_than_a_part_at_a_time(
    pieces: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(payload, "SYNC_BYTES", 64)
    monkeypatch.setattr(
        os, "fdatasync", lambda descriptor: seen.append(os.fstat(descriptor).st_size)
    )

    def write(stream: IO[bytes]) -> None:
        for size in pieces:
            stream.write(b"x" * size)

    record = payload.write_hashed(tmp_path / "file", write, Event())
    assert record.size == (tmp_path / "file").stat().st_size == sum(pieces)
    unsynced = [after - before for before, after in zip([0, *seen], [*seen, 1000], strict=True)]
    assert max(unsynced) < 2 * 64


def test_a_last_save_that_fails_is_taken_for_success(
    tmp_path: Path, data: Path, nursery: Nursery
) -> None:
    file = runs.write_run(tmp_path / "run.yaml", data, training={"steps": 5})
    fault = json.dumps({"full_disk": {"rank": 0, "steps": [4, 99]}})
    ranks = nursery.start(tmp_path / "log", [fault, file], entry=FAULTY)
    assert "step-00000005 was not saved (rank 0: " in ranks.end(expect=1)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_what_a_killed_save_left_undone_stays_so_when_the_run_resumes(
    tmp_path: Path, data: Path, nursery: Nursery
) -> None:
    """A kill after the last checkpoint had its name: nothing is saved any more that would rotate."""
    file = runs.write_run(
        tmp_path / "run.yaml",
        data,
        training={"steps": 6},
        checkpoint={"every": 2, "keep_last": 2},
        telemetry={"enabled": False},
    )
    nursery.start(tmp_path / "log", [file]).end()
    folder = tmp_path / "run" / "checkpoints"
    (folder / LATEST_NAME).write_text("step-00000004\n")
    nursery.start(tmp_path / "log", [file, "checkpoint.keep_last=1"]).end()
    assert [info.step for info in list_checkpoints(folder)] == [6]
    assert read_latest(folder) == "step-00000006"


def test_the_bench_of_saving_measures_nothing_or_leaves_something(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    command = ["bench", "checkpoint", "--preset", "tiny", "--rounds", "2", "--json"]
    command += ["--threads", "1", "--scratch", str(tmp_path / "scratch")]
    # A process of its own, which imports DeepSpeed late, as a user's does: it logs to stdout then.
    told = subprocess.run(
        [sys.executable, "-m", "sgt_ds", *command],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    [bench] = json.loads(told.stdout)["by_threads"]
    # Weights, master weights and two moments, four bytes each.
    assert bench["checkpoint_bytes"] > 16 * bench["parameters"]
    assert bench["stall_ratio"] == bench["stall_seconds"] / bench["at_once_seconds"] > 0
    assert bench["written_seconds"] > bench["stall_seconds"]
    assert not list((tmp_path / "scratch").iterdir())


def test_the_first_copy_of_a_checkpoint_waits_for_new_memory() -> None:
    tensors = {name: torch.full((3_000_000,), 1.0) for name in "abc"}
    pages = sum(tensor.nbytes for tensor in tensors.values()) // resource.getpagesize()

    def faults_of_a_copy(snapshots: Snapshots) -> int:
        snapshots.begin()
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        copied = snapshots.copy(tensors)
        after = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        snapshots.end()
        assert all(torch.equal(copied[name], tensors[name]) for name in tensors)
        snapshots.close()
        return after - before

    assert faults_of_a_copy(Snapshots()) < pages / 10
    prepared = Snapshots()
    prepared.prepare(tensor.nbytes for tensor in tensors.values())
    assert faults_of_a_copy(prepared) < pages / 10


def test_a_rank_that_saves_no_tensor_gets_memory_for_it() -> None:
    module = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.AdamW(module.parameters())

    def size(zero: bool, other: bool) -> int:
        saves = {"save_zero_checkpoint": zero, "save_non_zero_checkpoint": other}
        return sum(saved_sizes(SimpleNamespace(module=module, optimizer=optimizer, **saves)))

    assert [size(True, False), size(False, True), size(False, False)] == [3 * 64, 3 * 64, 0]
