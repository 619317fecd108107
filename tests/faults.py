"""Every fault that a run on two hosts can meet, and what becomes of the run: a table.

`python tests/faults.py [PART OF A NAME …]`, as root: hosts of namespaces (see `hosts.py`), two ranks
a host, in the middle of training and of growth, beside a second job that must not notice. Exit
status 1 where one row is not as it must be.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hosts
from fault_bench import FAULT_STEP, Bench, Job, Row, last_step, table, wait
from hosts import NoHosts, two_hosts

from sgt_ds.ports import free_ports

OUTAGE_SECONDS = 20
SMALL_DISK_MB = 40
LIBFAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")

# libfaketime 0.9.10 answers Python's time.sleep, which sleeps until a time of the monotonic clock,
# with EINVAL where that clock is not faked.
REAL_SLEEP = """
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    return syscall(SYS_clock_nanosleep, clock, flags, until, left) ? errno : 0;
}
"""

Make = Callable[[], Row]


def process_faults(bench: Bench) -> dict[str, Make]:
    """What ends or stops processes; the second job runs on both hosts."""
    first, second = bench.hosts

    def kill(pids: list[int], number: int = signal.SIGKILL) -> None:
        assert pids, "nothing to kill"
        for pid in pids:
            os.kill(pid, number)

    def top(job: Job) -> int:
        return hosts.inside(job.process)

    def twice(job: Job) -> None:
        kill(bench.ranks(job, second)[:1], signal.SIGSTOP)  # or it would save in time
        kill([top(job)], signal.SIGTERM)
        wait((job.run_dir / "control" / "stop").exists, 30)
        kill([top(job)], signal.SIGTERM)

    def raw(name: str, *place: str) -> tuple[Path, list[str]]:
        run = bench.write(name.replace(" ", "-"))
        port = str(free_ports())
        own = ["--master_port", port, "--module", "sgt_ds.train", str(run)]
        return run, ["deepspeed", *place, *own]

    def raw_row(name: str, *place: str, expect: int) -> Row:
        run, command = raw(name, *place)
        return bench.row(
            name,
            lambda job: kill([top(job)], signal.SIGTERM),
            run=run,
            command=command,
            expect=expect,
        )

    over_ssh = ("--hostfile", str(bench.hostfile), "--ssh_port", str(hosts.SSH_PORT))
    meeting = ("--master_addr", first.address)
    node = "sgt_ds.launch.node"
    kill_rank = "kill -9 of a rank"
    rows: dict[str, Callable[[str], Row]] = {
        kill_rank: lambda n: bench.row(n, lambda job: kill(bench.ranks(job, second)[:1])),
        "kill -9 of a node's launcher": lambda n: bench.row(
            n, lambda job: kill(bench.pythons(job, f"-m {node}", second))
        ),
        "kill -9 of all of a host's processes": lambda n: bench.row(
            n, lambda job: kill(bench.processes(job, "", second))
        ),
        "kill -9 of the top launcher": lambda n: bench.row(
            n, lambda job: kill(bench.pythons(job, "-m sgt_ds.launch.multinode", first))
        ),
        "kill -9 of sgt-ds train": lambda n: bench.row(
            n, lambda job: kill([top(job)]), expect=-signal.SIGKILL, within=90
        ),
        "SIGSTOP of a rank": lambda n: bench.row(
            n, lambda job: kill(bench.ranks(job, second)[:1], signal.SIGSTOP)
        ),
        "SIGTERM to sgt-ds train": lambda n: bench.row(
            n, lambda job: kill([top(job)], signal.SIGTERM), expect=0
        ),
        "SIGTERM twice": lambda n: bench.row(n, twice, expect=128 + signal.SIGTERM),
        "SIGTERM to the raw launcher, two hosts": lambda n: raw_row(
            n, *over_ssh, *meeting, expect=1
        ),
        "SIGTERM to the raw launcher, one host": lambda n: raw_row(
            n, "--num_gpus", "4", expect=-signal.SIGTERM
        ),
        "kill -9 of a rank under mpirun": lambda n: bench.row(
            n,
            lambda job: kill(bench.ranks(job, second)[:1]),
            options=("--launcher", "openmpi"),
        ),
        "kill -9 of a rank, restarted": lambda n: restarted(bench, n, kill),
    }
    return {name: (lambda make=make, name=name: make(name)) for name, make in rows.items()}


def restarted(bench: Bench, name: str, kill: Callable[[list[int]], None]) -> Row:
    """`--max-restarts`: goes on by itself from the newest checkpoint."""
    second = bench.hosts.second
    others = bench.neighbours_processes()
    run = bench.write(name.replace(" ", "-"))
    with bench.ended(bench.start(run, "--max-restarts", "1")) as job:
        wait(lambda: last_step(job) >= FAULT_STEP, 240, job)
        reached = last_step(job)
        kill(bench.ranks(job, second)[:1])
        began = time.monotonic()
        wait(lambda: "resumed" in job.said() and last_step(job) > reached + 2, 240, job)
        seconds = time.monotonic() - began
        status = bench.stop(job)
    faults = bench.compare(run) + bench.check_neighbour(others)
    if status:
        faults.append(f"exit status {status}")
    told = next(line for line in job.said().splitlines() if "restart 1 of 1" in line)
    return Row(name, "restarted", seconds, status, told.partition("sgt-ds train: ")[2], faults)


def network_faults(bench: Bench) -> dict[str, Make]:
    """What happens between the hosts; the second job has no need of the network."""
    made = bench.hosts
    second = made.second

    def outage(job: Job) -> None:
        made.unplug(second)
        time.sleep(OUTAGE_SECONDS)
        made.plug(second)

    rows: dict[str, Callable[[str], Row]] = {
        "link down": lambda n: bench.row(
            n, lambda job: made.unplug(second), repair=lambda: made.plug(second)
        ),
        f"link down for {OUTAGE_SECONDS} s": lambda n: bench.survived(n, outage, lambda: None),
        "5% of packets lost": lambda n: bench.survived(
            n, lambda job: made.drop(5), lambda: made.drop(0)
        ),
        "partition, except ssh": lambda n: bench.row(
            n,
            lambda job: made.drop(100, tcp_except=hosts.SSH_PORT),
            repair=lambda: made.drop(0),
        ),
    }
    return {name: (lambda make=make, name=name: make(name)) for name, make in rows.items()}


def place_faults(bench: Bench, small_disk: Path) -> dict[str, Make]:
    """What happens to a host's disk and clock."""

    def full_disk(name: str) -> Row:
        run = bench.write("disk-full", small_disk)
        filler = small_disk / "filler"

        def fill(job: Job) -> None:
            with filler.open("wb") as stream:
                while True:
                    try:
                        stream.write(bytes(1 << 16))
                        stream.flush()
                    except OSError:
                        return

        return bench.survived(
            name,
            fill,
            filler.unlink,
            run=run,
            until=lambda job: "retrying at the next" in job.said(),
        )

    def clock_jump(name: str) -> Row:
        second = bench.hosts.second
        clock = bench.folder / "clock"
        clock.write_text("+0")
        real_sleep = bench.folder / "real_sleep.so"
        compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(real_sleep)]
        subprocess.run(compiler, input=REAL_SLEEP, text=True, check=True)
        bench.hosts.kill(second)
        bench.hosts.boot(
            second,
            {
                "LD_PRELOAD": f"{real_sleep}:{LIBFAKETIME}",
                "FAKETIME_TIMESTAMP_FILE": str(clock),
                "FAKETIME_NO_CACHE": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            },
        )
        row = bench.survived(name, lambda job: clock.write_text("+400d"), lambda: None)
        said = second.run(["env", f"LD_PRELOAD={LIBFAKETIME}", "FAKETIME=+400d", "date", "+%Y"])
        assert int(said.stdout) > time.localtime().tm_year, "libfaketime does nothing"
        bench.hosts.kill(second)
        bench.hosts.boot(second)
        return row

    rows = {"disk full": full_disk, "clock of a host jumps by 400 days": clock_jump}
    return {name: (lambda make=make, name=name: make(name)) for name, make in rows.items()}


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own, soon full."""
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_MB}m", "sgt-test", str(folder)],
        check=True,
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def main(chosen: list[str]) -> int:
    """Print the table. Returns the exit status."""
    began = time.monotonic()
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="sgt-faults-") as name,
        small_disk(Path(name) / "small") as disk,
        two_hosts(Path(name)) as made,
    ):
        bench = Bench(made, Path(name))
        bench.make_reference()
        on_both = bench.over_hosts(made.hostfile(Path(name) / "hosts-of-other", slots=1))
        for group, options in (
            (process_faults(bench), on_both),
            (network_faults(bench), ("--num-gpus", "2")),
            (place_faults(bench, disk), ("--num-gpus", "2")),
        ):
            picked = {
                fault: make
                for fault, make in group.items()
                if not chosen or any(part in fault for part in chosen)
            }
            if not picked:
                continue
            with bench.neighbour(f"other-{len(rows)}", *options):
                for fault, make in picked.items():
                    try:
                        rows.append(make())
                    except AssertionError as error:
                        rows.append(Row(fault, "?", 0, None, "", [f"{error}"[-1500:]]))
                    made.drop(0)
                    print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(rows))
    print(f"\n{len(rows)} faults in {(time.monotonic() - began) / 60:.1f} min")
    return int(any(row.faults for row in rows))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clean up as after an error
    try:
        raise SystemExit(main(sys.argv[1:]))
    except NoHosts as error:
        print(f"faults: no hosts can be made here: {error}", file=sys.stderr)
        raise SystemExit(1) from None
