"""Puts one fault into a run on two hosts, and holds what follows to what must follow.

Faults are put in once the run has passed a step; what follows is waited for, not slept for.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import hosts
import runs
from hosts import Host, Hosts

from sgt_ds.launch import read_record

# Growth goes on from update 4 to 34; a checkpoint every fourth update.
SECTIONS = {
    "growth": {"t_start": 4, "interval": 6},
    "training": {"steps": 1_000_000, "validate_every": 1_000_000},
    "checkpoint": {"every": 4},
}
FAULT_STEP = 9
REFERENCE_STEPS = 120


@dataclass
class Job:
    """A run on the hosts: its file, and the process that stands for `sgt-ds train` or a launcher."""

    run: Path
    process: subprocess.Popen[str]
    output: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def run_dir(self) -> Path:
        """Where it writes."""
        return self.run.with_suffix("")

    def said(self) -> str:
        """What it printed."""
        return self.output.read_text(errors="replace")


@dataclass
class Row:
    """What a fault led to."""

    name: str
    outcome: str
    seconds: float
    status: int | None
    message: str
    faults: list[str] = field(default_factory=list)


class Bench:
    """Two hosts, data, and an uninterrupted run to compare with."""

    def __init__(self, made: Hosts, folder: Path) -> None:
        self.hosts, self.folder = made, folder
        self.data = runs.write_data(folder / "data")
        self.hostfile = made.hostfile(folder / "hostfile")
        self.losses: dict[int, float] = {}
        self.journal: list[dict[str, object]] = []
        self._neighbour: Job | None = None

    def write(self, name: str, folder: Path | None = None, **sections: object) -> Path:
        """A run file."""
        return runs.write_run(
            (folder or self.folder) / f"{name}.yaml",
            self.data,
            **{**SECTIONS, "telemetry": {"enabled": False}, **sections},
        )

    def start(self, run: Path, *options: str, on: Host | None = None) -> Job:
        """`sgt-ds train` on the first host, over pdsh unless the options say where."""
        place = () if {"--num-gpus", "--hostfile"} & set(options) else self.over_hosts()
        return self.launch(run, ["sgt-ds", "train", str(run), *place, *options], on)

    def over_hosts(self, hostfile: Path | None = None) -> tuple[str, ...]:
        """Options of a launch on both."""
        return "--hostfile", str(hostfile or self.hostfile), "--ssh-port", str(hosts.SSH_PORT)

    def launch(self, run: Path, command: Sequence[str], on: Host | None = None) -> Job:
        """Start a command line that trains the run."""
        output = run.with_name(f"{run.stem}-{time.monotonic_ns()}.out")
        environment = {
            **runs.environment(),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        with output.open("w") as stream:
            process = (on or self.hosts.first).start(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        return Job(run, process, output)

    def processes(self, job: Job, part: str = "", host: Host | None = None) -> list[int]:
        """The job's processes on one host, or on both; its `sgt-ds train` is none of them."""
        marks = [str(job.run_dir), job.run.name]
        if record := read_record(job.run_dir):
            marks.append(record.run_id)
        found = []
        for one in [host] if host else list(self.hosts):
            for pid in one.processes(part):
                text = hosts.command_line(pid) + _environment(pid)
                if any(mark in text for mark in marks) and "bin/sgt-ds" not in hosts.command_line(
                    pid
                ):
                    found.append(pid)
        return found

    def pythons(self, job: Job, module: str, host: Host) -> list[int]:
        """The job's processes on a host that run a module: not the shells and ssh around them."""
        return [
            pid
            for pid in self.processes(job, module, host)
            if Path(hosts.command_line(pid).split()[0]).name.startswith("python")
        ]

    def ranks(self, job: Job, host: Host) -> list[int]:
        """The job's ranks on a host."""
        return self.pythons(job, "-m sgt_ds.train", host)

    def make_reference(self) -> None:
        """Train without a fault, as far as any row will come."""
        run = self.write("whole")
        with self.ended(self.start(run)) as job:
            wait(lambda: last_step(job) >= REFERENCE_STEPS, 600, job)
            self.stop(job)
        self.losses = runs.losses(job.run_dir)
        self.journal = runs.journal_lines(job.run_dir)

    @contextmanager
    def neighbour(self, name: str, *options: str) -> Iterator[None]:
        """A second job for the length of the block."""
        with self.ended(self.start(self.write(name), *options)) as job:
            wait(lambda: last_step(job) >= 2, 240, job)
            for pid in self.processes(job):
                os.setpriority(os.PRIO_PROCESS, pid, 19)  # it need only live
            self._neighbour = job
            yield
            self._neighbour = None

    def check_neighbour(self, before: set[int]) -> list[str]:
        """What has become of the second job meanwhile."""
        job = self._neighbour
        if job is None:
            return []
        if set(self.processes(job)) != before:
            return ["the other job's processes changed"]
        step = last_step(job)
        try:
            wait(lambda: last_step(job) > step, 120, job)
        except AssertionError:
            return ["the other job stands still"]
        return []

    def neighbours_processes(self) -> set[int]:
        """Those of the second job."""
        return set(self.processes(self._neighbour)) if self._neighbour else set()

    @contextmanager
    def ended(self, job: Job) -> Iterator[Job]:
        """The job for the length of a block; whatever is left of it then is killed."""
        try:
            yield job
        finally:
            runs.end(job.process)
            for pid in self.processes(job):
                os.kill(pid, signal.SIGKILL)

    def stop(self, job: Job) -> int:
        """Let it save and end."""
        os.kill(hosts.inside(job.process), signal.SIGTERM)
        return job.process.wait(timeout=180)

    def check_resume(self, run: Path, *options: str) -> list[str]:
        """Train on past the fault, and compare with the run that met none."""
        job = Job(run, subprocess.Popen(["true"], text=True), run)
        reached = last_step(job)
        with self.ended(self.start(run, *options)) as job:
            wait(lambda: "resumed" in job.said() and last_step(job) > reached + 2, 240, job)
            status = self.stop(job)
        faults = [f"the resumed run ended with {status}"] if status else []
        return faults + self.compare(run)

    def compare(self, run: Path) -> list[str]:
        """Losses and journal against the uninterrupted run's, as far as both go."""
        run_dir = run.with_suffix("")
        losses = {s: v for s, v in runs.losses(run_dir).items() if s <= max(self.losses)}
        if losses != {step: self.losses[step] for step in losses} or len(losses) < FAULT_STEP:
            return ["losses differ from the uninterrupted run's"]
        last = max(losses)
        journal = [line for line in runs.journal_lines(run_dir) if line["step"] <= last]
        if journal != [line for line in self.journal if line["step"] <= last]:
            return ["the journal differs from the uninterrupted run's"]
        return []

    def row(
        self,
        name: str,
        put_in: Callable[[Job], object],
        *,
        expect: int | None = 1,
        within: float = 60,
        run: Path | None = None,
        command: Sequence[str] | None = None,
        options: Sequence[str] = (),
        resume: bool = True,
        repair: Callable[[], object] = lambda: None,
    ) -> Row:
        """Put a fault into a running job, wait until it has ended, look what is left, resume.

        `expect`: exit status. `within`: seconds until nothing of it runs any more.
        """
        print(f"— {name}", file=sys.stderr, flush=True)
        run = run or self.write(name.replace(" ", "-"))
        others = self.neighbours_processes()
        job = self.launch(run, command) if command else self.start(run, *options)
        with self.ended(job):
            wait(lambda: last_step(job) >= FAULT_STEP, 240, job)
            put_in(job)
            began = time.monotonic()
            faults = []
            try:
                wait(lambda: not self.processes(job), within + 60)
            except AssertionError:
                faults.append(f"orphans: {[hosts.command_line(p) for p in self.processes(job)]}")
            seconds = time.monotonic() - began
            try:
                status = job.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                status = None
                faults.append("sgt-ds train has not ended")
        if seconds > within:
            faults.append(f"took {seconds:.0f} s, may take {within:.0f}")
        if status != expect:
            faults.append(f"exit status {status}, must be {expect}")
        repair()
        saved = last_step(job)
        if resume:
            faults += self.check_resume(run)
        faults += self.check_neighbour(others)
        outcome = "saved and exited" if f"saved at step {saved}" in job.said() else "stopped"
        return Row(name, outcome, seconds, status, message_of(job.said()), faults)

    def survived(
        self,
        name: str,
        put_in: Callable[[Job], object],
        repair: Callable[[], object],
        *,
        run: Path | None = None,
        until: Callable[[Job], bool] = lambda job: True,
    ) -> Row:
        """A fault that a run must outlast: training goes on without anybody's help.

        `until`: what must have shown before the fault is repaired. `repair`: called before the run's end.
        """
        print(f"— {name}", file=sys.stderr, flush=True)
        others = self.neighbours_processes()
        with self.ended(self.start(run or self.write(name.replace(" ", "-")))) as job:
            wait(lambda: last_step(job) >= FAULT_STEP, 240, job)
            began = time.monotonic()
            put_in(job)
            faults = []
            try:
                wait(lambda: until(job), 120, job)
                step = told_step(job)
                wait(lambda: told_step(job) > step + 2, 120, job)
            except AssertionError as error:
                faults.append(f"did not go on: {error}")
            seconds = time.monotonic() - began
            repair()
            status = self.stop(job) if not faults else None
        if status:
            faults.append(f"exit status {status}")
        faults += self.compare(job.run) + self.check_neighbour(others)
        return Row(name, "continues", seconds, status, message_of(job.said()), faults)


def wait(true: Callable[[], object], seconds: float, job: Job | None = None) -> None:
    """Wait until something is so; fail when the time is up, or when the job has ended before."""
    deadline = time.monotonic() + seconds
    while not true():
        if job is not None and job.process.poll() is not None and not true():
            raise AssertionError(f"ended with {job.process.returncode}: {job.said()[-3000:]}")
        if time.monotonic() > deadline:
            raise AssertionError(
                f"not within {seconds:.0f} s{': ' + job.said()[-2000:] if job else ''}"
            )
        time.sleep(0.1)


def last_step(job: Job) -> int:
    """The newest step of the job's run."""
    return runs.last_step(job.run_dir)


def told_step(job: Job) -> int:
    """The newest step that it printed: a run whose disk is full has its rows in memory."""
    return max((int(step) for step in re.findall(r"\bstep (\d+)/", job.said())), default=0)


def message_of(said: str) -> str:
    """The line that tells why a run ended: the supervisor's last, or a rank's."""
    lines = re.findall(r"sgt-ds train: (?!starting )(.*)", said)
    return lines[-1] if lines else said.strip().splitlines()[-1][:200] if said.strip() else ""


def _environment(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def table(rows: Sequence[Row]) -> str:
    """As Markdown."""
    lines = [
        "| fault | what happens | seconds | exit status | orphans, resume, other job | last line |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        found = " ".join("; ".join(row.faults).split()) or "none, bit for bit, untouched"
        status = "–" if row.status is None else row.status
        lines.append(
            f"| {row.name} | {row.outcome} | {row.seconds:.1f} | {status} | {found} | "
            f"{row.message.replace('|', '/')} |"
        )
    return "\n".join(lines)
