"""Signs of life: a hang must name the right rank, and a run that goes on must not be ended."""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import runs
from torch.distributed import TCPStore

from sgt_ds.errors import LostPeer, NotMet
from sgt_ds.launch import watch
from sgt_ds.launch.node import RankProcess
from sgt_ds.telemetry import heartbeats
from sgt_ds.telemetry.heartbeats import Beat
from sgt_ds.training import launcher_watch, lost_peers
from sgt_ds.training.heartbeat import Heartbeat
from sgt_ds.training.launcher_watch import LauncherWatch
from sgt_ds.training.part_limits import PartLimits


def beat(rank: int, part: str = "reduce", count: int = 20, **values: object) -> Beat:
    fields = {"step": 7, "limit_seconds": 60.0, "silence_seconds": 60.0, **values}
    return Beat(rank, f"host-{rank // 2}", 100 + rank, part=part, count=count, **fields)  # type: ignore[arg-type]


def test_a_rank_that_computes_is_late_and_the_others_wait() -> None:
    beats = [(beat(0), 0), (beat(1), 1), (beat(2, "forward", 19), 0), (beat(3), 0)]
    assert heartbeats.hang(beats, 61) == (
        "rank 2 on host-1 (process 102) is late: in forward of step 7 for 61 s; "
        "ranks 0, 1, 3 wait in reduce of step 7"
    )


def test_a_silent_rank_is_named_before_one_that_waits_elsewhere() -> None:
    beats = [(beat(0), 0), (beat(1, "optimizer", 21), 0), (beat(2, "backward", 19), 62)]
    told = heartbeats.hang(beats, 61)
    assert told.startswith("rank 2 on host-1 (process 102) has given no sign of life for 62 s")
    assert "last in backward of step 7" in told
    assert "rank 1 waits in optimizer of step 7; rank 0 waits in reduce of step 7" in told


def test_no_rank_is_blamed_where_all_wait_for_each_other() -> None:
    told = heartbeats.hang([(beat(rank), 0) for rank in range(4)], 60)
    assert "no rank is late: ranks 0, 1, 2, 3 wait in reduce of step 7" in told
    assert "network" in told


def test_only_ranks_past_their_own_limit_are_silent() -> None:
    compiling = beat(1, "forward", limit_seconds=600.0, silence_seconds=600.0)
    beats = [(beat(0), 61), (compiling, 61), (beat(2, end="done"), 61)]
    assert [one.rank for one, _ in heartbeats.silent(beats)] == [0]


def test_a_rank_furthest_behind_may_take_the_time_of_its_own_part() -> None:
    waits = (beat(0, seconds=300.0), 0)
    slow = beat(1, "data", 19, limit_seconds=600.0, seconds=300.0)
    assert heartbeats.awaited_seconds([waits, (slow, 10)], 600) == 300
    assert heartbeats.awaited_seconds([waits, (slow, 10)], 30) == 20, "then it may be silent"
    assert heartbeats.awaited_seconds([waits, (slow, 31)], 30) == 0, "stopped, not slow"
    assert heartbeats.awaited_seconds([waits, (replace(slow, seconds=601.0), 0)], 30) == 0
    moved_on = beat(1, "forward", 19, seconds=5.0)
    assert heartbeats.awaited_seconds([waits, (moved_on, 0)], 30), "its next part began just now"
    ahead = beat(1, "checkpoint", 21, limit_seconds=600.0)
    assert heartbeats.awaited_seconds([waits, (ahead, 0)], 30) == 0, "who is ahead waits for us"


def test_the_next_look_is_when_a_rank_may_be_silent() -> None:
    beats = [(beat(0, silence_seconds=50.0), 10), (beat(1, silence_seconds=50.0), 48)]
    assert heartbeats.soonest_silence(beats) == 2
    assert heartbeats.soonest_silence([*beats, (beat(2, silence_seconds=50.0), 51)]) == 0
    assert heartbeats.soonest_silence([(beat(0, end="done"), 99)]) == math.inf


@pytest.mark.parametrize("limit", [51.0, 55.0, 60.0, 75.0, 100.0, 300.0])
def test_a_hang_is_told_long_after_the_limit_of_its_part(
    limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a clock: the thread's looks one after another."""

    def end(status: int) -> None:
        raise SystemExit(status)

    heart = Heartbeat(tmp_path, 0, hang_seconds=50, patient_seconds=600)
    monkeypatch.setattr(os, "_exit", end)
    heart.update(0, ())
    heart.update(1, ())
    heart.enter("forward")
    heart._limits._paces["forward"] = limit
    looks: list[float] = [0.0]

    def stand_still() -> None:
        while looks[-1] < 700:
            heart._count_stuck(1.0 if looks[-1] else 0.0)
            looks.append(looks[-1] + 1.0)

    with pytest.raises(SystemExit):
        stand_still()
    assert limit < looks[-1] <= limit + 3


def test_who_is_stopped_while_awaited_is_told_as_late_as_who_is_slow() -> None:
    waits = (beat(0, seconds=100.0), 1)
    stopped = beat(1, "data", 19, limit_seconds=600.0, seconds=100.0)
    assert heartbeats.awaited_seconds([waits, (stopped, 20)], 25) == 5


def test_who_lost_a_peer_is_not_who_died() -> None:
    lost = {"end": "rank 0 lost another rank", "blames_peer": True}
    beats = [(beat(0, **lost), 0), (beat(1), 0), (beat(2, **lost), 0)]
    assert (
        heartbeats.deaths(beats)
        == "rank 1 on host-0 (process 101) died, last seen in reduce of step 7"
    )
    failed = (beat(2, end="No space left on device"), 0)
    assert "rank 2 on host-1 (process 102) failed" in heartbeats.deaths(
        [beats[0], beats[1], failed]
    )
    assert heartbeats.deaths([(beat(0, end="done"), 0)]) == ""
    orphaned = [(beat(0, end="done"), 0), (beat(2, end=heartbeats.LAUNCHER_GONE), 0)]
    assert heartbeats.deaths(orphaned) == "the launcher on host-1 died; all ranks exited"


def test_a_rank_that_a_signal_ended_has_just_died() -> None:
    lost = (beat(0, end="rank 0 lost another rank", blames_peer=True), 0)
    dead, other = (beat(1), 0), (beat(2), 0)
    kills = [heartbeats.Kill(1, "host-0", 101, signal.SIGKILL)]
    name = "rank 1 on host-0 (process 101)"
    killed = f"{name} was killed by signal 9 (SIGKILL; perhaps by the kernel, for lack of memory)"
    place = "last seen in reduce of step 7"
    assert heartbeats.deaths([lost, dead], kills) == f"{killed}, {place}"
    assert heartbeats.deaths([lost, dead], (), signal.SIGSEGV) == (
        f"{name} was killed by signal 11 (SIGSEGV), {place}"
    )
    # A status that tells no rank is of one of two.
    both = heartbeats.deaths([lost, dead, other], (), signal.SIGKILL)
    assert both == f"{name}, rank 2 on host-1 (process 102) died, {place}"
    assert heartbeats.deaths([lost, dead, other], kills) == (
        f"{killed}; rank 2 on host-1 (process 102) died, {place}"
    )
    kills.append(heartbeats.Kill(2, "host-1", 102, signal.SIGKILL))
    assert "all 2 ranks were killed by signal 9" in heartbeats.deaths([dead, other], kills)
    # Before the first heartbeat, as while torch loads; and of an earlier process of that number.
    assert heartbeats.deaths([lost], kills[:1]) == f"{killed}, before its first sign of life"
    # Who was only asked to end, by the launcher, did not fall.
    asked = (beat(0, asked=True), 0)
    assert heartbeats.deaths([asked], kills[:1]) == f"{killed}, before its first sign of life"
    assert "killed" not in heartbeats.deaths([asked], (), signal.SIGKILL)
    kills = [heartbeats.Kill(1, "host-0", 99, signal.SIGKILL)]
    assert heartbeats.deaths([lost, dead], kills) == f"{name} died, {place}"


def test_a_launcher_that_meets_another_end_first_misses_the_rank_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGT_SIGNS_OF_LIFE", str(tmp_path))
    well, killed, lost = (
        RankProcess(["sh", "-c", script], env={"RANK": str(rank), "PATH": os.environ["PATH"]})
        for rank, script in enumerate(["exit 0", "kill -s SEGV $$", "exit 1"])
    )
    for process in (well, killed, lost):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert well.poll() == 0
    assert heartbeats.read_kills(tmp_path) == []
    assert lost.poll() == 1
    [(kill, _)] = heartbeats.read_kills(tmp_path)
    told = (1, os.uname().nodename, killed.pid, signal.SIGSEGV)
    assert (kill.rank, kill.host, kill.pid, kill.number) == told
    assert killed.wait() == -signal.SIGSEGV


def test_a_full_disk_passes_for_a_missing_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    written = heartbeats.write_beat(tmp_path, beat(3))
    os.utime(tmp_path / "rank-00003.json", (1, 1))
    monkeypatch.setattr(Path, "write_text", refuse)
    assert heartbeats.write_beat(tmp_path, beat(3)) >= written, "it lives"
    with pytest.raises(OSError, match="No space left"):
        heartbeats.write_beat(tmp_path, beat(4))


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
    if rank == "0" and then != "meet":
        heart.enter("reduce")
    print("there", flush=True)
    if then == "wait":
        sys.stdin.readline()
    elif then == "meet":
        with heart.waiting():
            time.sleep(60)
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
    late, waiting = (rank(tmp_path, number, "hang", limit=10) for number in (1, 0))
    said = "".join(process.communicate(timeout=60)[1] for process in (late, waiting))
    assert (late.returncode, waiting.returncode) == (1, 1)
    assert said.count("sgt-ds train:") == 1
    assert (
        f"rank 1 on {os.uname().nodename} (process {late.pid}) is late: in forward of step 1"
        in said
    )
    assert (tmp_path / heartbeats.HANG_FILE).read_text() in said


def test_a_wait_within_a_part_that_may_last_is_a_hang(tmp_path: Path) -> None:
    """As where the network goes while ranks agree on a checkpoint."""
    both = [rank(tmp_path, number, "meet", limit=10, part="checkpoint") for number in (0, 1)]
    said = "".join(process.communicate(timeout=60)[1] for process in both)
    assert [process.returncode for process in both] == [1, 1]
    assert "no rank is late: ranks 0, 1 wait in agreement of step 1" in said


def test_a_launch_in_the_place_of_one_that_hung_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / heartbeats.HANG_FILE).write_text("of an earlier launch\n")
    os.utime(tmp_path / heartbeats.HANG_FILE, (time.time() - 100, time.time() - 100))
    process = rank(tmp_path, 0, "wait", limit=30)
    time.sleep(2.5)  # longer than between two looks, shorter than the limit
    assert process.poll() is None
    process.communicate("go on\n", timeout=60)
    assert process.returncode == 0
    [(last, _)] = heartbeats.read_beats(tmp_path)
    assert last.end == "done"


def test_a_rank_that_ended_well_died_where_its_last_sign_but_one_came_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that others keep busy: the thread is still at a sign of life when training has ended."""
    write, is_writing, has_ended = heartbeats.write_beat, threading.Event(), threading.Event()

    def slow_write(folder: Path, told: Beat) -> float:
        if threading.current_thread().name == "heartbeat":
            is_writing.set()
            has_ended.wait(timeout=3)  # longer than training waits for the thread
        return write(folder, told)

    monkeypatch.setattr(heartbeats, "write_beat", slow_write)
    with Heartbeat(tmp_path, 0, hang_seconds=3, patient_seconds=60) as heart:
        assert is_writing.wait(timeout=60)
    has_ended.set()
    heart._thread.join(timeout=60)
    [(last, _)] = heartbeats.read_beats(tmp_path)
    assert heartbeats.deaths([(last, 0)]) == ""


def test_the_end_of_a_rank_waits_for_a_disk_that_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, is_writing, answers = heartbeats.write_beat, threading.Event(), threading.Event()

    def hung_write(folder: Path, told: Beat) -> float:
        if is_started.is_set():
            is_writing.set()
            answers.wait(timeout=60)
        return write(folder, told)

    monkeypatch.setattr(heartbeats, "write_beat", hung_write)
    is_started = threading.Event()
    with Heartbeat(tmp_path, 0, hang_seconds=2, patient_seconds=60) as heart:
        is_started.set()
        assert is_writing.wait(timeout=60)
        over = time.monotonic()
    assert time.monotonic() - over < 30
    answers.set()
    heart._thread.join(timeout=60)
    [(last, _)] = heartbeats.read_beats(tmp_path)
    assert last.end == heartbeats.DONE


def test_slow_data_of_one_rank_does_not_end_those_that_wait_for_it(tmp_path: Path) -> None:
    limit = 8.0
    slow, waiting = (rank(tmp_path, number, "wait", limit=limit, part="data") for number in (1, 0))
    deadline = time.monotonic() + 60
    while all(one.seconds <= limit + 1 for one, _ in heartbeats.read_beats(tmp_path)):
        assert (slow.poll(), waiting.poll()) == (None, None)
        assert time.monotonic() < deadline
        time.sleep(0.2)
    for process in (waiting, slow):  # who waits must not outlive the one that it waits for
        assert process.communicate("go on\n", timeout=60)[1] == ""
        assert process.returncode == 0


def test_ranks_are_silent_only_where_the_supervisor_could_have_heard_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock[0])
    looks = watch.Watch(tmp_path, "launch")
    looks.begin()
    [folder] = tmp_path.glob("control/ranks/*")

    def look_after(seconds: float) -> str:
        clock[0] += seconds
        return looks.hang()

    heartbeats.write_beat(folder, beat(0, limit_seconds=600.0, silence_seconds=10.0))
    assert look_after(3) == ""
    assert look_after(1000) == "", "the shared directory stood still, or this process did"
    assert [look_after(3) for _ in range(2)] == ["", ""]
    assert "rank 0 on host-0 (process 100) has given no sign of life for 13 s" in look_after(3)


def until(truth: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not truth():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_supervisor_that_was_suspended_is_back(tmp_path: Path) -> None:
    heartbeats.write_supervisor(tmp_path)
    os.utime(tmp_path / heartbeats.SUPERVISOR_FILE, (1, 1))  # hosts' clocks need not agree
    looks = LauncherWatch(tmp_path, launched=False)
    lost = []
    for seconds in (2, launcher_watch.SUPERVISOR_SECONDS, 1):
        looks.look_at_supervisor(seconds)
        lost.append(looks.is_orphaned)
    assert lost == [False, False, True]
    heartbeats.renew_supervisor(tmp_path)
    looks.look_at_supervisor(1)
    assert not looks.is_orphaned


def test_a_supervisor_that_was_killed_is_missed_at_once_by_ranks_that_ssh_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor_here = heartbeats.supervisor_here

    def read_slowly(folder: Path) -> int | None:
        time.sleep(0.5)
        return supervisor_here(folder)

    monkeypatch.setattr(heartbeats, "supervisor_here", read_slowly)
    waits = [sys.executable, "-c", "import signal; signal.pause()", "sgt-ds"]
    with subprocess.Popen(waits) as supervisor:
        name = f"{supervisor.pid} {os.uname().nodename}\n"
        (tmp_path / heartbeats.SUPERVISOR_FILE).write_text(name)
        # A hang would end the process of the tests: what is waited for is missed before that.
        with Heartbeat(tmp_path, 0, hang_seconds=60, patient_seconds=600) as heart:
            until(lambda: not heart._launcher_watch._seeks_supervisor)
            assert not heart.launcher_lost
            supervisor.kill()
            until(lambda: heart.launcher_lost)


def test_a_launcher_that_ends_while_the_disk_refuses_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "ranks"
    waits = [sys.executable, "-c", "import signal; signal.pause()", "deepspeed"]
    with subprocess.Popen(waits) as launcher:
        # A process that has just begun has no command line yet, by which a launcher is known.
        command = Path(f"/proc/{launcher.pid}/cmdline")
        until(lambda: b"deepspeed" in command.read_bytes())
        monkeypatch.setattr(os, "getppid", lambda: launcher.pid)
        with Heartbeat(folder, 0, hang_seconds=60, patient_seconds=600) as heart:
            shutil.rmtree(folder, ignore_errors=True)
            folder.touch()
            missed = not heart.launcher_lost
            launcher.kill()
            until(lambda: heart.launcher_lost)
    assert missed


CLOSED = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4711\nand more"


@pytest.mark.parametrize(
    ("said", "ranks", "part", "raises"),
    [
        (CLOSED, 2, "reduce", LostPeer),
        ("NCCL error, remote process exited or there was a network error", 2, "reduce", LostPeer),
        ("NCCL error, invalid usage (run with NCCL_DEBUG=WARN)", 2, "reduce", RuntimeError),
        ("CUDA error: the launch timed out and was terminated", 2, "reduce", RuntimeError),
        (CLOSED, 1, "reduce", RuntimeError),
        (CLOSED, 2, "start", NotMet),
    ],
)
def test_another_rank_is_blamed_only_where_the_cause_says_so(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    ranks: int,
    part: str,
    raises: type[Exception],
) -> None:
    monkeypatch.setattr(lost_peers.log, "propagate", True)
    heart = Heartbeat(tmp_path, 0, world_size=ranks, hang_seconds=60, patient_seconds=60)
    heart.enter(part)
    with (
        pytest.raises(raises) as raised,
        lost_peers.lost_peers_told(heart),
    ):
        raise RuntimeError(said)
    if raises is not RuntimeError:
        assert said.splitlines()[0] in str(raised.value)
        assert "\n" not in str(raised.value)
        assert str(raised.value.__cause__) == said
        assert said in caplog.text


def test_ranks_that_do_not_meet_end_in_a_librarys_traceback(tmp_path: Path) -> None:
    """The second of two comes to where the ranks meet, and the first one goes."""
    meeting = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    places = {
        **{"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        "MASTER_PORT": str(meeting.port),
    }
    rank = subprocess.Popen(
        runs.single(runs.write_run(tmp_path / "run.yaml", tmp_path)),
        env={**runs.environment(), **places},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        alone, deadline = meeting.num_keys(), time.monotonic() + 120
        while meeting.num_keys() == alone and time.monotonic() < deadline:
            time.sleep(0.1)
        del meeting
        said = rank.communicate(timeout=120)[1]
    finally:
        runs.end(rank)
    assert rank.returncode == 1
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if line.startswith("sgt-ds train: ")]
    assert "could not reach the other ranks, or lost one during start-up: " in line


def test_a_rank_whose_launcher_was_gone_before_it_looked_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not LauncherWatch(tmp_path, launched=True).is_orphaned
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert LauncherWatch(tmp_path, launched=True).is_orphaned
    assert not LauncherWatch(tmp_path, launched=False).is_orphaned, "started by hand"


def test_a_slow_disk_of_reports_or_the_first_reduction_is_a_hang() -> None:
    limits, found = PartLimits(60, 600), []
    for part in ("reduce", "reduce", "report", "growth"):
        limits.update("shape")
        limits.enter(part)
        found.append(limits.limit_seconds)
    assert found == [600, 60, 600, 60]


def test_a_save_that_holds_up_signs_of_life_is_silence(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path, 0, hang_seconds=60, patient_seconds=600)
    heart.enter("data")

    def told() -> float:
        heart._write()
        ((mine, _),) = heartbeats.read_beats(tmp_path)
        return mine.silence_seconds

    assert told() == 60
    heart.saves = lambda: True
    assert told() == 600


def test_a_slow_machine_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    limits, found = PartLimits(60, 600), []
    for seconds in (40, 20, 20, 70, 1):
        limits.update("shape")
        limits.enter("forward")
        found.append(limits.limit_seconds)
        clock[0] += seconds
        limits.enter("reduce")
        clock[0] += 100  # others were late: no pace of this rank
    assert found == [600, 80, 200, 200, 600]
    assert limits.limit_seconds == 60
