"""A rank that is stopped where the others wait for it, or killed: noticed soon, and the right one told."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import runs
from forked import Nursery, Ranks

from sgt_ds.launch.watch import Watch
from sgt_ds.telemetry import heartbeats
from sgt_ds.training import roll_back

FAULTY = "faulty:main"
HANG_SECONDS = 5

Answer = TypeVar("Answer")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_data(tmp_path_factory.mktemp("data"))


def start(
    folder: Path, name: str, data: Path, nursery: Nursery, fault: object, *, steps: int = 6
) -> Ranks:
    file = runs.write_run(
        folder / f"{name}.yaml",
        data,
        training={"steps": steps, "hang_seconds": HANG_SECONDS},
        checkpoint={"every": 3},
        telemetry={"enabled": False},
    )
    return nursery.start(folder / f"{name}.log", [json.dumps(fault), file], ranks=2, entry=FAULTY)


def signs_of_life(run_dir: Path) -> Path:
    """Where the ranks of its one launch leave them."""
    [folder] = until(lambda: list(run_dir.glob("control/ranks/*")))
    return folder


def until(truth: Callable[[], Answer], seconds: float = 120) -> Answer:
    """Wait until something is so. Returns what it is."""
    deadline = time.monotonic() + seconds
    while not (found := truth()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


def test_a_rank_that_is_stopped_in_a_save_data_or_the_end_is_waited_for_as_long_as_a_collective(
    tmp_path: Path, data: Path, nursery: Nursery
) -> None:
    places = {"save": "agreement of step 2", "data": "data of step 0", "end": "end of step 5"}
    started = {
        place: start(tmp_path, place, data, nursery, {"stop": {"rank": 1, "place": place}})
        for place in places
    }
    # At the end the others have gone: it is the supervisor who notices.
    supervisor = Watch(tmp_path / "end", signs_of_life(tmp_path / "end").name)
    supervisor.begin()
    for place, ranks in started.items():
        first, second = ranks.pids
        if place == "end":
            told = until(supervisor.hang)
        else:
            assert ranks.status(first, 120) == 1, ranks.said()[-2000:]
            told = ranks.said()
        name = f"rank 1 on {os.uname().nodename} (process {second})"
        assert f"{name} has given no sign of life for" in told
        assert f"last in {places[place]}" in told
        os.kill(second, signal.SIGKILL)


@pytest.mark.parametrize("slow", [{"slow_journal": {}}, {"slow_compilers": {"step": 4}}])
def test_a_slow_disk_under_the_journal_or_the_end_of_compilers_is_taken_for_a_hang(
    slow: dict[str, dict[str, int]], tmp_path: Path, data: Path, nursery: Nursery
) -> None:
    ((what, when),) = slow.items()
    fault = {what: {**when, "seconds": 1.5 * HANG_SECONDS}}
    start(tmp_path, "run", data, nursery, fault, steps=8).end()
    assert [line for line in runs.journal_lines(tmp_path / "run") if "rule" in line]


def test_a_lost_journal_is_noted_in_a_part_that_rank_0_alone_enters(
    tmp_path: Path, data: Path, nursery: Nursery
) -> None:
    """From there on rank 0 would count as ahead, and another rank be told as late."""
    run = tmp_path / "run"
    start(tmp_path, "run", data, nursery, {}, steps=12).end()
    assert roll_back(run, 6).step == 6
    (run / "growth.jsonl").rename(tmp_path / "lost.jsonl")
    shutil.rmtree(run / "control" / "ranks")
    told = start(tmp_path, "run", data, nursery, {}, steps=12).end()
    assert "growth.jsonl is missing; a new journal starts at step 6 " in told
    noted, *later = [line for line in runs.journal_lines(run) if line["type"] == "decision"]
    assert (noted["step"], noted["rule"]) == (6, "stall")
    assert noted["reason"] == "journal: lines are missing before this one"
    assert [line["step"] for line in later] == [8, 10, 12], "growth goes on, and is journalled"
    beats = [beat for beat, _ in heartbeats.read_beats(signs_of_life(run))]
    assert [(beat.rank, beat.end) for beat in beats] == [(0, "done"), (1, "done")]
    assert beats[0].count == beats[1].count > 0


def test_a_rank_that_is_killed_while_all_join_is_one_of_many_that_died(
    tmp_path: Path, data: Path, nursery: Nursery
) -> None:
    ranks = start(tmp_path, "run", data, nursery, {"lingers": 1})
    folder = signs_of_life(tmp_path / "run")
    supervisor = Watch(tmp_path / "run", folder.name)
    supervisor.begin()
    until(lambda: len(supervisor._beats()) == 2)
    first, second = ranks.pids
    os.kill(second, signal.SIGKILL)
    os.kill(first, signal.SIGTERM)  # as launchers do with those that are left
    assert ranks.statuses() == [128 + signal.SIGTERM, -signal.SIGKILL]
    name = f"rank 1 on {os.uname().nodename} (process {second})"
    assert supervisor.deaths() == f"{name} died, last seen in start of step 0"
    assert not (folder / heartbeats.HANG_FILE).exists()
