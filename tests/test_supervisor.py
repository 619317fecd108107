"""`sgt-ds train` and `sgt-ds stop`: signals, faults, exit codes, and no process left behind."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import runs

from sgt_ds.checkpoints import list_checkpoints, verify
from sgt_ds.config import RunLayout, load_run_config, prepare_run_directory
from sgt_ds.errors import SgtError, UserError
from sgt_ds.files import take_lock
from sgt_ds.launch import (
    Host,
    Launch,
    Target,
    kill_processes,
    processes_of,
    read_record,
    stop,
    supervise,
    supervisor,
)
from sgt_ds.launch.ends import newest_step
from sgt_ds.launch.record import StopAsked
from sgt_ds.launch.supervisor import _ranks_words
from sgt_ds.ports import free_ports
from sgt_ds.telemetry import read_outcome
from sgt_ds.training.faults import Requests
from sgt_ds.training.heartbeat import Heartbeat

pytestmark = pytest.mark.launcher

FOREVER = {"steps": 1_000_000, "validate_every": 1_000_000}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_data(tmp_path_factory.mktemp("data"))


@contextmanager
def training(run: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """`sgt-ds train` in the background; whatever a failed test leaves is ended."""
    # What it says is shown with a test that fails.
    process = subprocess.Popen(
        ["sgt-ds", "train", str(run), *options], env=runs.environment(), start_new_session=True
    )
    try:
        yield process
    finally:
        record = read_record(run.with_suffix(""))
        runs.end(process)
        if record is not None:
            kill_processes(record.run_id)


def run_id(run: Path) -> str:
    record = read_record(run.with_suffix(""))
    assert record is not None
    return record.run_id


def command_line(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:  # it has just ended
        return ""


def processes(run: Path, part: str) -> list[int]:
    """The run's processes whose command line holds `part`."""
    return sorted(pid for pid in processes_of(run_id(run)) if part in command_line(pid))


def group_of(leader: int) -> list[int]:
    """Processes of a process group, its leader gone or not; zombies are left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(group) == leader and state != "Z":
                found.append(int(entry.name))
    return found


def wait_until(true: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_is_stopped_from_outside_and_others_go_on(tmp_path: Path, data: Path) -> None:
    one = runs.write_run(tmp_path / "one.yaml", data, training=FOREVER)
    two = runs.write_run(tmp_path / "two.yaml", data, training=FOREVER)
    with training(one, "--num-gpus", "2") as first, training(two, "--grace", "2") as second:
        runs.wait_for_step(tmp_path / "one", 3)
        runs.wait_for_step(tmp_path / "two", 3)
        ids = run_id(one), run_id(two)
        again = subprocess.run(
            ["sgt-ds", "train", str(one), "telemetry.enabled=false"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (again.returncode, again.stderr.count("\n")) == (2, 1)
        assert "is being trained" in again.stderr
        stopped = subprocess.run(
            ["sgt-ds", "stop", str(tmp_path / "one")], capture_output=True, text=True, check=False
        )
        assert stopped.returncode == 0, stopped.stderr
        assert "stopped as requested" in stopped.stdout
        assert first.wait(timeout=60) == 0
        assert processes_of(ids[0]) == []
        [checkpoint] = list_checkpoints(tmp_path / "one" / "checkpoints")[:1]
        assert verify(checkpoint.path) == []
        assert checkpoint.step == runs.last_step(tmp_path / "one")
        # The other run has not noticed; its rank, frozen, can't save within the grace.
        before = runs.last_step(tmp_path / "two")
        runs.wait_for_step(tmp_path / "two", before + 2)
        [rank] = processes(two, "-m sgt_ds.train")
        os.kill(rank, signal.SIGSTOP)
        asked = time.monotonic()
        second.send_signal(signal.SIGTERM)
        assert second.wait(timeout=60) == 128 + signal.SIGTERM  # a grace of 120 would outlast that
        assert time.monotonic() - asked >= 2
        assert processes_of(ids[1]) == []


@pytest.mark.parametrize("end", ["grace", "stop", "kill"])
def test_a_saved_run_that_waits_for_its_scraper_is_killed_as_one_that_did_not_stop(
    end: str, tmp_path: Path, data: Path
) -> None:
    """Its supervisor's grace is over, or that of `sgt-ds stop`; or something kills the rank."""
    telemetry = {"port": free_ports(2), "port_in_use": "next"}
    run = runs.write_run(tmp_path / "run.yaml", data, training=FOREVER, telemetry=telemetry)
    control = RunLayout(tmp_path / "run").control
    with training(run, "--grace", "4" if end == "grace" else "120") as process:
        runs.wait_for_step(tmp_path / "run", 3)
        runs.scrape(tmp_path / "run" / "targets.json", 0)
        asked = time.monotonic()
        if end == "stop":
            stopped = subprocess.run(
                ["sgt-ds", "stop", "--grace", "4", str(tmp_path / "run")], check=False
            )
            assert stopped.returncode == 0
        else:
            process.send_signal(signal.SIGTERM)
        if end == "kill":
            wait_until(lambda: read_outcome(control), 60)
            [rank] = processes(run, "-m sgt_ds.train")
            os.kill(rank, signal.SIGKILL)
        assert process.wait(timeout=60) == 0
        assert time.monotonic() - asked >= 4 or end == "kill", "it did not wait"
        told = read_outcome(control)
    assert told is not None
    last = runs.last_step(tmp_path / "run")
    assert told.reason == f"stopped as requested; saved at step {last} of {FOREVER['steps']}"


def test_a_rank_that_saves_and_ends_unasked_counts_as_a_run_that_was_stopped(
    tmp_path: Path, data: Path
) -> None:
    """As ranks do whose launcher has gone; one that is to be restarted would not be."""
    run = runs.write_run(tmp_path / "run.yaml", data, training=FOREVER)
    with training(run) as process:
        runs.wait_for_step(tmp_path / "run", 3)
        [rank] = processes(run, "-m sgt_ds.train")
        os.kill(rank, signal.SIGTERM)
        assert process.wait(timeout=60) == 1
    told = read_outcome(RunLayout(tmp_path / "run").control)
    assert told is not None
    assert told.status == 1
    assert "without being asked to stop" in told.reason
    assert f"at step {runs.last_step(tmp_path / 'run')} " in told.reason, "it has saved"


def test_a_killed_rank_and_a_killed_launcher_are_restarted_and_nothing_is_lost(
    tmp_path: Path, data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Long enough that a fast machine is still training when the kill comes.
    steps = {"steps": 150, "validate_every": 50}
    whole = runs.write_run(tmp_path / "whole.yaml", data, training=steps)
    run = runs.write_run(tmp_path / "run.yaml", data, training=steps)
    uninterrupted = subprocess.Popen(
        runs.launcher(whole, 2), env=runs.environment(), start_new_session=True
    )
    with training(run, "--num-gpus", "2", "--max-restarts", "2") as process:
        runs.wait_for_step(tmp_path / "run", 7)  # past the checkpoint of step 6
        first = run_id(run)
        ranks = {
            dict(
                entry.split("=", 1)
                for entry in Path(f"/proc/{pid}/environ").read_text().split("\0")
                if "=" in entry
            )["RANK"]: pid
            for pid in processes(run, "-m sgt_ds.train")
        }
        rank = ranks["1"]
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: read_record(tmp_path / "run") and run_id(run) != first, 90)
        assert processes_of(first) == []
        wait_until(lambda: runs.last_step(tmp_path / "run") >= 13, 180)
        second = run_id(run)
        # DeepSpeed's runner ends with status 0 when the launcher of its host is killed.
        [launcher] = processes(run, "-m sgt_ds.launch.node")
        os.kill(launcher, signal.SIGKILL)
        wait_until(lambda: read_record(tmp_path / "run") and run_id(run) != second, 90)
        assert processes_of(second) == []
        assert process.wait(timeout=180) == 0
    try:
        assert uninterrupted.wait(timeout=60) == 0
    finally:
        runs.end(uninterrupted)
    assert runs.losses(tmp_path / "run") == runs.losses(tmp_path / "whole")
    assert runs.journal_lines(tmp_path / "run") == runs.journal_lines(tmp_path / "whole")
    told = next(line for line in capfd.readouterr().err.splitlines() if "; restart 1 of 2" in line)
    name = f"rank 1 on {os.uname().nodename} (process {rank})"
    assert f"the run failed: {name} was killed by signal 9 (SIGKILL; perhaps by the kernel" in told


def test_a_second_signal_ends_at_once_and_a_killed_supervisor_leaves_no_orphan(
    tmp_path: Path, data: Path
) -> None:
    run = runs.write_run(tmp_path / "run.yaml", data, training=FOREVER)
    with training(run) as process:
        runs.wait_for_step(tmp_path / "run", 2)
        this = run_id(run)
        os.kill(processes(run, "-m sgt_ds.train")[0], signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        wait_until((tmp_path / "run" / "control" / "stop").exists)
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        assert process.wait(timeout=30) == 128 + signal.SIGINT
        assert time.monotonic() - started < 15
        assert processes_of(this) == []
    with training(run) as process:
        wait_until(lambda: read_record(tmp_path / "run") and processes(run, "-m sgt_ds.train"), 60)
        this = run_id(run)
        os.kill(processes(run, "-m sgt_ds.train")[0], signal.SIGSTOP)  # else it would notice
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert processes_of(this)
        again = subprocess.run(
            ["sgt-ds", "train", str(run), "telemetry.enabled=false"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert again.returncode == 2
        assert "whose supervisor is gone" in again.stderr
        runs.run_to_end(["sgt-ds", "stop", str(tmp_path / "run"), "--grace", "1"], expect=1)
        assert processes_of(this) == []
        runs.run_to_end(["sgt-ds", "stop", str(tmp_path / "run")], expect=2)
    before = runs.last_step(tmp_path / "run")
    with training(run) as process:
        # Steps of the first run may still be told: none was saved, and nobody has cut them back.
        runs.wait_for_step(tmp_path / "run", before + 2)
        this = run_id(run)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_until(lambda: not processes_of(this), 60)  # it saves, and ends by itself
    [checkpoint] = list_checkpoints(tmp_path / "run" / "checkpoints")[:1]
    assert checkpoint.step == runs.last_step(tmp_path / "run")


def test_a_raw_launcher_that_dies_takes_its_ranks_along_saved(tmp_path: Path, data: Path) -> None:
    """Alone, it ends with 143 and leaves them to train on."""
    run = runs.write_run(tmp_path / "run.yaml", data, training=FOREVER)
    process = subprocess.Popen(
        runs.launcher(run, 2), env=runs.environment(), start_new_session=True
    )
    try:
        runs.wait_for_step(tmp_path / "run", 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == -signal.SIGTERM
        wait_until(lambda: not group_of(process.pid), 60)
    finally:
        for pid in group_of(process.pid):
            os.kill(pid, signal.SIGKILL)
    [checkpoint] = list_checkpoints(tmp_path / "run" / "checkpoints")[:1]
    assert verify(checkpoint.path) == []
    assert checkpoint.step == runs.last_step(tmp_path / "run")


def test_a_raw_run_has_to_be_stopped_by_hand(tmp_path: Path, data: Path) -> None:
    run, run_dir = runs.write_run(tmp_path / "run.yaml", data, training=FOREVER), tmp_path / "run"
    assert "no such run" in runs.run_to_end(["sgt-ds", "stop", str(run_dir)], expect=2)
    process = subprocess.Popen(runs.launcher(run, 1), env=runs.environment())
    try:
        runs.wait_for_step(run_dir, 2)
        busy = runs.run_to_end(["sgt-ds", "train", str(run)], expect=2)
        assert f"`sgt-ds stop {run_dir}` ends that run" in busy
        told = runs.run_to_end(["sgt-ds", "stop", str(run_dir)])
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
    assert f"stopped as requested; saved at step {runs.last_step(run_dir)}" in told
    assert "no run is in progress" in runs.run_to_end(["sgt-ds", "stop", str(run_dir)], expect=2)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (Target((Host("127.0.0.1", 2, 1),), None, local=True), "2 ranks on this machine"),
        (Target((Host("worker-1", 8, 1),), Path("hosts"), local=False), "8 ranks on worker-1"),
        (
            Target((Host("a", 8, 1), Host("b", 8, 2)), Path("hosts"), local=False),
            "16 ranks on 2 hosts",
        ),
    ],
)
def test_a_start_names_another_place_than_where_its_ranks_are(target: Target, said: str) -> None:
    assert _ranks_words(target) == said


def test_a_full_disk_is_a_traceback_or_changes_how_a_run_ended(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    config = load_run_config(runs.write_run(tmp_path / "run.yaml", data))
    prepare_run_directory(config, resuming=False)
    launch = Launch(config, Target((Host("localhost", 1, 1),), None, local=True), [])
    for module in ("launch.record", "telemetry.outcome"):
        monkeypatch.setattr(f"sgt_ds.{module}.write_text_atomically", refuse)
    with pytest.raises(UserError, match=r"run_dir: cannot be written \(No space left"):
        supervise(lambda overrides: launch)
    assert supervisor._end(config.run_dir, 0, "complete at step 20") == 0
    assert capsys.readouterr().err == "sgt-ds train: complete at step 20\n"
    # A request to stop that cannot be written yet ends no supervisor.
    asked = StopAsked(config.run_dir)
    with monkeypatch.context() as refused:
        refused.setattr(Path, "touch", lambda path: refuse(path, ""))
        assert not supervisor._is_told(asked)
    assert supervisor._is_told(asked)
    assert asked.is_set()


def test_a_folder_that_does_not_answer_ends_a_run(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / ("long" * 100))  # of which the file system tells nothing
    with pytest.raises(OSError, match="File name too long"):
        layout.stop_request.exists()
    assert not StopAsked(layout.run_dir).is_set()
    assert newest_step(layout) == -1
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with Heartbeat(tmp_path / "ranks", 0, hang_seconds=60, patient_seconds=60) as heartbeat:
            requests = Requests(layout, heartbeat)
            assert not requests.freeze()
            assert not requests.stop()
            requests.stopped()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_stop_of_a_complete_run_says_so(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_run_config(runs.write_run(tmp_path / "run.yaml", data))
    prepare_run_directory(config, resuming=False)
    module = importlib.import_module("sgt_ds.launch.stop")
    for step, told in (
        (19, "no run is in progress on this host; .* create the file .*/control/stop"),
        (20, "complete at step 20"),
    ):
        monkeypatch.setattr(module, "newest_step", lambda layout, step=step: step)
        with pytest.raises(UserError, match=told):
            stop(config.run_dir, grace_seconds=1, say=print)
    lock = take_lock(config.run_dir / "control" / "training.lock")
    assert lock is not None
    # The last checkpoint is not yet the end: someone trains it still.
    with pytest.raises(SgtError, match="has not exited within 1 s; it is under the raw launcher"):
        stop(config.run_dir, grace_seconds=1, say=print)
    assert not RunLayout(config.run_dir).stop_request.exists()  # it would end the next start
    os.close(lock)


def test_what_is_wrong_is_said_in_one_line_before_the_launch(tmp_path: Path, data: Path) -> None:
    run = runs.write_run(tmp_path / "run.yaml", data)
    build = tmp_path / "extensions" / "py311_cpu" / "fused_adam" / "lock"
    build.parent.mkdir(parents=True)
    build.touch()
    os.utime(build, (0, 0))
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=2\nworker-2 slots=2\n")

    def refusal(*options: str, **variables: str) -> str:
        done = subprocess.run(
            ["sgt-ds", "train", str(run), *options],
            env={**runs.environment(), **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert not (tmp_path / "run").exists()
        return done.stderr

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        taken_port = refusal(f"telemetry.port={port}")
        assert "telemetry.port: " in taken_port
        assert "telemetry.port_in_use: next" in taken_port
        # Of a run that holds its ports, that it is being trained is told, not the ports.
        lock = tmp_path / "busy" / "control" / "training.lock"
        lock.parent.mkdir(parents=True)
        held = take_lock(lock)
        assert held is not None
        busy = refusal(f"telemetry.port={port}", f"run_dir={tmp_path / 'busy'}")
        assert "run_dir: is being trained" in busy
        os.close(held)
    assert "telemetry.host: '192.0.2.1' is not an address of" in refusal("telemetry.host=192.0.2.1")
    assert "run_dir: /proc/x: nothing can be created in /proc" in refusal("run_dir=/proc/x")
    assert f"{run} is not a folder; choose a run_dir other than" in refusal(f"run_dir={run}/x")
    assert f"telemetry.targets_dir: {run} is not a folder" in refusal(
        f"telemetry.targets_dir={run}"
    )
    cached = refusal("training.compile=true", f"training.compile_cache={run}")
    assert f"training.compile_cache: {run} is not a folder" in cached
    assert "micro_batch_size" in refusal("--num-gpus", "3")
    assert "line 1" in refusal("--hostfile", str(hostfile))
    absent = str(tmp_path / "absent")
    assert f"{absent}: --hostfile: no such hostfile; check the path" in refusal(
        "--hostfile", absent
    )
    assert str(build) in refusal(TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"))
    assert "training.compile" in refusal("training.compile=true", CXX="no-such-compiler")
    assert "/nowhere" in refusal("data.validation=/nowhere")
    assert "deepspeed" in refusal("--deepspeed_config", "/nowhere.json").lower()
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").touch()
    assert "init: is a transformers model" in refusal(f"init={tmp_path / 'export'}")
