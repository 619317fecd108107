"""Signs of life: a hang must name the right rank, and a run that goes on must not be ended."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

from sgt_ds.telemetry import heartbeats
from sgt_ds.telemetry.heartbeats import Beat

NOW = 1000.0


def beat(rank: int, part: str = "reduce", count: int = 20, **values: object) -> Beat:
    fields = {"step": 7, "limit_seconds": 60.0, **values}
    return Beat(rank, f"host-{rank // 2}", 100 + rank, part=part, count=count, **fields)  # type: ignore[arg-type]


def test_a_rank_that_computes_is_late_and_the_others_wait() -> None:
    beats = [(beat(0), NOW), (beat(1), NOW - 1), (beat(2, "forward", 19), NOW), (beat(3), NOW)]
    assert heartbeats.hang(beats, NOW, 61) == (
        "rank 2 on host-1 (process 102) is late: in forward of step 7 for 61 s; "
        "ranks 0, 1, 3 wait in reduce of step 7"
    )


def test_a_silent_rank_is_named_before_one_that_waits_elsewhere() -> None:
    beats = [(beat(0), NOW), (beat(1, "optimizer", 21), NOW), (beat(2, "backward", 19), NOW - 62)]
    told = heartbeats.hang(beats, NOW, 61)
    assert told.startswith("rank 2 on host-1 (process 102) has given no sign of life for 62 s")
    assert "last in backward of step 7" in told
    assert "rank 1 waits in optimizer of step 7; rank 0 waits in reduce of step 7" in told


def test_no_rank_is_blamed_where_all_wait_for_each_other() -> None:
    told = heartbeats.hang([(beat(rank), NOW) for rank in range(4)], NOW, 60)
    assert "no rank is late: ranks 0, 1, 2, 3 wait in reduce of step 7" in told
    assert "network" in told


def test_only_ranks_past_their_own_limit_are_silent() -> None:
    compiling = beat(1, "forward", limit_seconds=600.0)
    beats = [(beat(0), NOW - 61), (compiling, NOW - 61), (beat(2, end="done"), NOW - 61)]
    assert [one.rank for one, _ in heartbeats.silent(beats, NOW)] == [0]


def test_a_rank_furthest_behind_may_take_the_time_of_its_own_part() -> None:
    waits = (beat(0, seconds=300.0), NOW)
    slow = beat(1, "data", 19, limit_seconds=600.0, seconds=300.0)
    assert heartbeats.is_awaited([waits, (slow, NOW - 10)], NOW, 30)
    assert not heartbeats.is_awaited([waits, (slow, NOW - 31)], NOW, 30), "stopped, not slow"
    assert not heartbeats.is_awaited([waits, (replace(slow, seconds=601.0), NOW)], NOW, 30)
    moved_on = beat(1, "forward", 19, seconds=5.0)
    assert heartbeats.is_awaited([waits, (moved_on, NOW)], NOW, 30), "its next part began just now"
    ahead = beat(1, "checkpoint", 21, limit_seconds=600.0)
    assert not heartbeats.is_awaited([waits, (ahead, NOW)], NOW, 30), "who is ahead waits for us"


def test_who_lost_a_peer_is_not_who_died() -> None:
    lost = {"end": "rank 0 lost another rank", "blames_peer": True}
    beats = [(beat(0, **lost), NOW), (beat(1), NOW), (beat(2, **lost), NOW)]
    assert (
        heartbeats.deaths(beats)
        == "rank 1 on host-0 (process 101) died, last seen in reduce of step 7"
    )
    failed = (beat(2, end="No space left on device"), NOW)
    assert "rank 2 on host-1 (process 102) failed" in heartbeats.deaths(
        [beats[0], beats[1], failed]
    )
    assert heartbeats.deaths([(beat(0, end="done"), NOW)]) == ""


def test_files_are_read_whole_and_a_torn_one_is_left_out(tmp_path: Path) -> None:
    written = heartbeats.write_beat(tmp_path, beat(3))
    (tmp_path / "rank-00004.json").write_text('{"rank": 4')
    (tmp_path / "rank-00005.json").write_text('{"rank": 5}')
    assert heartbeats.read_beats(tmp_path) == [(beat(3), written)]


RANK = """
import sys, time
from pathlib import Path
from sgt_ds.training.heartbeat import Heartbeat

folder, rank, then, limit, part = sys.argv[1:]
with Heartbeat(Path(folder), int(rank), hang_seconds=float(limit), patient_seconds=60) as heart:
    heart.update(0, ())
    heart.update(1, ())
    heart.enter(part)
    if rank == "0":
        heart.enter("reduce")
    print("there", flush=True)
    if then == "wait":
        sys.stdin.readline()
    else:
        time.sleep(60)
"""


def rank(
    folder: Path, number: int, then: str, *, limit: float = 3, part: str = "forward"
) -> subprocess.Popen[str]:
    arguments = (str(folder), str(number), then, str(limit), part)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RANK), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    return process


def test_ranks_that_stand_still_end_by_themselves_and_one_tells_why(tmp_path: Path) -> None:
    (tmp_path / heartbeats.HANG_FILE).write_text("of an earlier launch\n")
    os.utime(tmp_path / heartbeats.HANG_FILE, (1, 1))
    late, waiting = rank(tmp_path, 1, "hang"), rank(tmp_path, 0, "hang")
    said = "".join(process.communicate(timeout=60)[1] for process in (late, waiting))
    assert (late.returncode, waiting.returncode) == (1, 1)
    assert said.count("sgt-ds train:") == 1
    assert (
        f"rank 1 on {os.uname().nodename} (process {late.pid}) is late: in forward of step 1"
        in said
    )
    assert (tmp_path / heartbeats.HANG_FILE).read_text() in said


def test_a_launch_in_the_place_of_one_that_hung_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / heartbeats.HANG_FILE).write_text("of an earlier launch\n")
    os.utime(tmp_path / heartbeats.HANG_FILE, (time.time() - 100, time.time() - 100))
    process = rank(tmp_path, 0, "wait")
    time.sleep(1.5)  # longer than between two looks, shorter than the limit
    assert process.poll() is None
    process.communicate("go on\n", timeout=60)
    assert process.returncode == 0
    [(last, _)] = heartbeats.read_beats(tmp_path)
    assert last.end == "done"


def test_slow_data_of_one_rank_does_not_end_those_that_wait_for_it(tmp_path: Path) -> None:
    limit = 8.0
    ranks = [rank(tmp_path, number, "wait", limit=limit, part="data") for number in (1, 0)]
    deadline = time.monotonic() + 60
    while all(one.seconds <= limit + 1 for one, _ in heartbeats.read_beats(tmp_path)):
        assert [process.poll() for process in ranks] == [None, None]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert [process.communicate("go on\n", timeout=60)[1] for process in ranks] == ["", ""]
    assert [process.returncode for process in ranks] == [0, 0]
