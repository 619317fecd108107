"""Training on two hosts: launchers, faults, and what a probe finds. Hosts are namespaces."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import fault_bench
import hosts
import pytest
import runs
from fault_bench import Bench, last_step, wait
from hosts import Hosts, NoHosts, two_hosts

from sgt_ds.checkpoints import list_checkpoints, verify
from sgt_ds.ports import free_ports

pytestmark = [pytest.mark.launcher, pytest.mark.network]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    try:
        with two_hosts(tmp_path_factory.mktemp("hosts")) as both:
            yield both
    except NoHosts as error:
        pytest.skip(f"no hosts can be made here: {error}")


@pytest.fixture(scope="module")
def bench(made: Hosts) -> Bench:
    return Bench(made, made.folder)


def test_a_killed_rank_is_named_and_nothing_is_lost(bench: Bench) -> None:
    """Kill -9 on the second host, over pdsh; the resume goes over mpirun; both on the right network."""
    whole = bench.write("whole")
    with bench.ended(bench.start(whole, "--num-gpus", "4")) as job:
        wait(lambda: last_step(job) >= 40, 240, job)
        assert bench.stop(job) == 0
    bench.losses, bench.journal = runs.losses(job.run_dir), runs.journal_lines(job.run_dir)
    run = bench.write("run")
    with bench.ended(bench.start(run)) as job:
        wait(lambda: last_step(job) >= 6, 240, job)
        assert len(bench.ranks(job, bench.hosts.first)) == 2
        os.kill(bench.ranks(job, bench.hosts.second)[0], signal.SIGKILL)
        assert job.process.wait(timeout=60) == 1
        assert bench.processes(job) == []
    told = fault_bench.message_of(job.said())
    assert "the run failed: rank 2 on host-b" in told
    assert "was killed by signal 9 (SIGKILL; perhaps by the kernel, for lack of memory)" in told
    assert "lost another rank in" in job.said()
    assert "Traceback" not in job.said()
    with bench.ended(bench.start(run, "--launcher", "openmpi")) as job:
        wait(lambda: "resumed" in job.said() and last_step(job) >= 10, 240, job)
        assert bench.stop(job) == 0
    assert bench.compare(run) == []


def test_a_stopped_rank_is_named_within_the_limit_and_ended_on_its_host(bench: Bench) -> None:
    limit = ("training.hang_seconds=15",)  # enough for a crowded machine
    with bench.ended(bench.start(bench.write("stopped"), *limit)) as job:
        wait(lambda: last_step(job) >= 2, 240, job)
        os.kill(bench.ranks(job, bench.hosts.second)[1], signal.SIGSTOP)
        assert job.process.wait(timeout=60) == 1
        assert bench.processes(job) == []
    told = fault_bench.message_of(job.said())
    assert "rank 3 on host-b" in told
    assert "no sign of life" in told
    assert "wait in" in told


def test_hosts_started_one_by_one_train_together_and_stop_together(bench: Bench) -> None:
    """As Slurm and Kubernetes do it: no ssh, a node rank each."""
    run, port = bench.write("nodes"), str(free_ports())
    place = ("--no-ssh", "--num-nodes", "2", "--num-gpus", "1", "--master-port", port)
    meeting = ("--master-addr", bench.hosts.first.address)
    with (
        bench.ended(bench.start(run, *place, *meeting, "--node-rank", "0")) as one,
        bench.ended(
            bench.start(run, *place, *meeting, "--node-rank", "1", on=bench.hosts.second)
        ) as two,
    ):
        wait(lambda: last_step(one) >= 3, 240, one)
        os.kill(hosts.inside(two.process), signal.SIGTERM)
        assert (one.process.wait(timeout=60), two.process.wait(timeout=60)) == (0, 0)
        assert bench.processes(one) == []
    [checkpoint] = list_checkpoints(one.run_dir / "checkpoints")[:1]
    assert verify(checkpoint.path) == []
    assert checkpoint.step == last_step(one)


def test_a_probe_finds_what_would_break_the_run(bench: Bench, tmp_path: Path) -> None:
    def probe(file: Path, *options: str) -> tuple[int, dict[str, list[str]]]:
        command = ["sgt-ds", "hostfile", "check", str(file), "--probe", "--json", *options]
        ssh = ("--ssh-port", str(hosts.SSH_PORT), "--shared", str(tmp_path))
        done = bench.hosts.first.run([*command, *ssh], env=runs.environment(), timeout=60)
        document = json.loads(done.stdout)
        return done.returncode, {host["name"]: host["faults"] for host in document["hosts"]}

    assert probe(bench.hostfile) == (0, {"host-a": [], "host-b": []})
    more = tmp_path / "hostfile"
    more.write_text(bench.hostfile.read_text() + "host-c slots=2\n")
    listener = bench.hosts.second.start(
        [
            "python3",
            "-c",
            "import signal, socket; s = socket.create_server(('', 9401)); signal.pause()",
        ]
    )
    try:
        wait(lambda: _listens(bench, 9401), 20)
        bench.hosts.second.run(["mount", "-t", "tmpfs", "elsewhere", str(tmp_path)])
        status, faults = probe(more)
    finally:
        runs.end(listener)
        bench.hosts.second.run(["umount", str(tmp_path)])
    assert status == 1
    assert faults["host-a"] == []
    assert any("does not see what this machine writes" in fault for fault in faults["host-b"])
    assert any("9401" in fault for fault in faults["host-b"])
    assert "not reachable by ssh" in faults["host-c"][0]
    refused = bench.hosts.first.run(
        [
            *("sgt-ds", "train", str(bench.write("refused")), "training.global_batch_size=12"),
            *bench.over_hosts(more),
        ],
        env=runs.environment(),
        timeout=60,
    )
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "line 3: host-c not reachable by ssh" in refused.stderr
    assert list(tmp_path.glob(".sgt-probe*")) == []


def _listens(bench: Bench, port: int) -> bool:
    done = bench.hosts.first.run(
        [
            "python3",
            "-c",
            f"import socket; socket.create_connection(('{bench.hosts.second.address}', {port}), 1)",
        ]
    )
    return done.returncode == 0
