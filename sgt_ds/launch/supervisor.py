"""Runs the launcher as a child, restarts it after a fault, and leaves no process behind.

A request to stop (SIGTERM, SIGINT, or the file RUN/control/stop) becomes that file; the ranks agree
on it, save and end. What does not end within the grace is killed: exactly the processes that carry
this launch's id, on every host. The launcher itself is never signalled, because DeepSpeed's pdsh
launcher answers by killing other jobs' processes too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from sgt_ds.config import RunConfig, RunLayout, dump_run_config
from sgt_ds.errors import SgtError, UserError
from sgt_ds.files import write_text_atomically, writing
from sgt_ds.launch.command import Target, deepspeed_command, master_address
from sgt_ds.launch.ends import (
    BAD_INPUT,
    Deaths,
    End,
    deaths_of,
    judge,
    last_checkpoint,
    newest_step,
)
from sgt_ds.launch.environment import (
    MASTER_ADDRESS_VARIABLE,
    MASTER_PORT_VARIABLE,
    SIGNS_VARIABLE,
    forwarded_environment,
    write_environment_file,
)
from sgt_ds.launch.hostfile import format_hostfile, world_size
from sgt_ds.launch.processes import RUN_ID_VARIABLE, processes_of
from sgt_ds.launch.record import (
    RunRecord,
    StopAsked,
    new_record,
    remove_record,
    supervision,
    write_record,
)
from sgt_ds.launch.run_processes import check_unattended, end_everywhere
from sgt_ds.launch.watch import Watch, node_run_id
from sgt_ds.ports import free_ports
from sgt_ds.telemetry import Outcome, read_outcome, write_outcome

POLL_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of a run, checked: what to run and where.

    `arguments`: of `sgt_ds.train` on this machine. Other hosts get the resolved configuration as a
    file: no shell between here and there can read it otherwise than it was meant.
    """

    config: RunConfig
    target: Target
    arguments: Sequence[str]


Prepare = Callable[[Sequence[str]], Launch]
"""Reads and checks everything again, under more `key=value` overrides. Raises: UserError."""


class StopSignals:
    """SIGTERM and SIGINT, counted: the first asks, the second ends at once."""

    def __init__(self) -> None:
        self.count, self.number = 0, 0
        self._before = {
            number: signal.signal(number, self._remember)
            for number in (signal.SIGTERM, signal.SIGINT)
        }

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.number = number

    def restore(self) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def supervise(
    prepare: Prepare,
    *,
    grace_seconds: float = 120.0,
    max_restarts: int = 0,
    first_pause_seconds: float = 5.0,
) -> int:
    """Train until the run is complete, was asked to stop, or failed too often. Returns its status.

    `prepare`: called before every start, so that a changed hostfile counts. `max_restarts`: starts
    after a fault without a new checkpoint in between. Status: 0 complete or stopped as asked,
    128 + signal where that had to be forced, 2 for bad input, 1 for a failed run.

    Where something else starts every host, the first one's supervisor holds the run; the others
    look after their own processes. Raises: UserError before the first start.
    """
    launch = prepare(())
    run_dir = launch.config.run_dir
    if launch.target.node_rank:
        return _supervise_node(launch, grace_seconds)
    with supervision(run_dir):
        check_unattended(run_dir)
        asked = StopAsked(run_dir)
        with writing(run_dir, "run_dir"):
            asked.clear()
        signals = StopSignals()
        try:
            return _train(
                prepare,
                launch,
                signals,
                asked,
                grace_seconds=grace_seconds,
                max_restarts=max_restarts,
                first_pause_seconds=first_pause_seconds,
            )
        finally:
            with suppress(OSError):  # the next start does it, if it can
                asked.clear()
                remove_record(run_dir)
            signals.restore()


def _train(
    prepare: Prepare,
    launch: Launch,
    signals: StopSignals,
    asked: StopAsked,
    *,
    grace_seconds: float,
    max_restarts: int,
    first_pause_seconds: float,
) -> int:
    """Start the run, and start it again after a fault, until its end. Returns its status."""
    run_dir, layout = launch.config.run_dir, RunLayout(launch.config.run_dir)
    failures, first = 0, newest_step(layout)
    while True:
        before = newest_step(layout)
        try:
            end = _run_once(launch, signals, asked, grace_seconds)
        except UserError as error:
            if not failures:  # the first start
                raise
            end = End(1, f"the run could not be started again: {error}")
        if end.status in (0, BAD_INPUT) or signals.count or asked.is_set():
            return _end(run_dir, *end)
        reason = end.reason
        failures = 1 if newest_step(layout) > before else failures + 1
        if failures > max_restarts:
            if max_restarts:
                reason += f"; gave up after {max_restarts} restarts without progress"
            return _end(run_dir, end.status, reason)
        pause = min(first_pause_seconds * 2 ** min(failures - 1, 16), LONGEST_PAUSE_SECONDS)
        _say(
            f"{reason}; restart {failures} of {max_restarts} in {pause:.0f} s, from step "
            f"{max(newest_step(layout), 0)}"
        )
        _pause(pause, signals, asked)
        if signals.count or asked.is_set():
            return _end(run_dir, 0, "stopped before the restart")
        # `resume: never` or a checkpoint by name said where the first start begins.
        own = newest_step(layout) > first or launch.config.resume == "never"
        launch = _prepare_again(prepare, ("resume=auto",) if own else (), launch)


def _supervise_node(launch: Launch, grace_seconds: float) -> int:
    """Look after the ranks of one host that is not the first."""
    signals, asked = StopSignals(), StopAsked(launch.config.run_dir)
    try:
        end = _run_once(launch, signals, asked, grace_seconds)
        if end.status == 0:  # obeyed, where it came to this host last: not for the next start
            with suppress(OSError):
                asked.clear()
        if end.status != BAD_INPUT:
            _say(end.reason)
        return end.status
    finally:
        signals.restore()


def _run_once(launch: Launch, signals: StopSignals, asked: StopAsked, grace_seconds: float) -> End:
    """Start the launcher, wait for its end, and leave nothing behind."""
    run_dir, target = launch.config.run_dir, launch.target
    control = RunLayout(run_dir).control
    told_before = read_outcome(control)

    def told_now() -> Outcome | None:
        """What rank 0 has said of its end; not what an earlier start's did."""
        told = read_outcome(control)
        return None if told == told_before else told

    record = _record_of(run_dir, target)
    watch = Watch(run_dir, record.run_id)
    with writing(run_dir, "run_dir"):
        if not target.node_rank:
            write_record(run_dir, record)
        watch.begin(target.node_rank)
    _say(f"starting {_ranks_words(target)}; their logs are in {RunLayout(run_dir).logs}")
    child = _start(launch, record, watch)
    forced: End | None = None
    try:
        forced = _wait(child, watch, signals, asked, grace_seconds, told_now)
        if forced is None:
            # The launcher may have died before its ranks: those are orphans then.
            _await_ranks(record, signals)
        orphans = len(processes_of(record.run_id))
        # Who still lives would count among the dead.
        deaths = Deaths() if orphans else deaths_of(watch, target, child.returncode)
    finally:
        left = end_everywhere(record, hurried=forced is not None)
        # The launcher carries the id too; reap it.
        child.wait()
    for fault in left:
        _say(f"could not confirm that all processes ended: {fault}")
    if forced is not None:
        if forced.status:
            forced = forced._replace(reason=f"{forced.reason}; {last_checkpoint(run_dir)}")
        return forced
    stopping = bool(signals.count) or asked.is_set()
    return judge(launch.config, child.returncode, orphans, deaths, told_now(), stopping=stopping)


def _record_of(run_dir: Path, target: Target) -> RunRecord:
    """What to record of a launch that is about to begin."""
    record = new_record(run_dir, target.remote_hosts, target.ssh_port)
    if target.node_rank is None:
        return record
    # Hosts that can't ask each other find the same name for the launch by themselves.
    meeting = f"{target.master_address}.{target.master_port}"
    launch_id = f"sgt.{meeting}.{os.environ.get('SLURM_JOB_ID', '0')}".replace(":", "-")
    return replace(record, run_id=node_run_id(launch_id, target.node_rank))


def _ranks_words(target: Target) -> str:
    """Which ranks this launch starts, in words."""
    hosts = target.own_hosts if target.node_rank is not None else list(target.hosts)
    where = f"{len(hosts)} hosts" if len(hosts) > 1 else hosts[0].name
    if target.local or target.node_rank is not None or hosts == target.own_hosts:
        where = "this machine"
    ranks = world_size(hosts)
    return f"{ranks} rank{'s' if ranks > 1 else ''} on {where}"


def _start(launch: Launch, record: RunRecord, watch: Watch) -> subprocess.Popen[bytes]:
    control, target = RunLayout(launch.config.run_dir).control.resolve(), launch.target
    environment = {
        **os.environ,
        RUN_ID_VARIABLE: record.run_id,
        SIGNS_VARIABLE: str(watch.folder.resolve()),
    }
    arguments, hostfile = launch.arguments, control / "hostfile"
    address, port = master_address(target), target.master_port or free_ports(host="")
    if not target.local:
        resolved, variables = control / "launch.yaml", control / "deepspeed_env"
        arguments = [str(resolved)]
        environment[MASTER_ADDRESS_VARIABLE] = address
        environment[MASTER_PORT_VARIABLE] = str(port)
        with writing(launch.config.run_dir, "run_dir"):
            write_text_atomically(hostfile, format_hostfile(target.hosts))
            write_text_atomically(resolved, dump_run_config(launch.config))
            write_environment_file(variables, forwarded_environment(environment))
        # DeepSpeed reads this file instead of the user's own, whose lines are in it already.
        environment["DS_ENV_FILE"] = str(variables)
    command = deepspeed_command(
        target,
        arguments,
        hostfile=hostfile,
        master_address=address,
        master_port=port,
    )
    # A session of its own: Ctrl-C at the terminal reaches this process only.
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )


def _wait(
    child: subprocess.Popen[bytes],
    watch: Watch,
    signals: StopSignals,
    asked: StopAsked,
    grace_seconds: float,
    told: Callable[[], Outcome | None],
) -> End | None:
    """Wait until the launcher has ended: None. Else how the launch ends, whose processes still live.

    `told`: the end that rank 0 has written down, if it has.
    """
    asked_at: float | None = None
    # Signals that come together count as one: `timeout`, for one, sends two.
    seen, untold = signals.count, True
    while child.poll() is None:
        time.sleep(POLL_SECONDS)
        if asked_at is None and (signals.count or asked.is_set()):
            asked_at, seen = time.monotonic(), signals.count
            _say(
                f"stop requested: the ranks save and exit within {grace_seconds:.0f} s; "
                "a second signal kills them at once"
            )
        if asked_at is not None:
            untold = untold and not _is_told(asked)
            if signals.count > max(seen, 1):
                why = "killed at once, as requested; unsaved progress is lost"
                return _well_ended(told) or End(128 + signals.number, why)
            if time.monotonic() - asked_at > grace_seconds:
                why = f"did not stop within {grace_seconds:.0f} s and was killed"
                status = 128 + (signals.number or signal.SIGTERM)
                return _well_ended(told) or End(status, why)
        if hang := watch.hang():
            return _well_ended(told) or End(1, hang)
    return None


def _well_ended(told: Callable[[], Outcome | None]) -> End | None:
    """The end of a run whose ranks have all saved, and only wait for their scrapers."""
    end = told()
    return End(0, end.reason, end.data_end_step) if end is not None and end.status == 0 else None


def _is_told(asked: StopAsked) -> bool:
    """Ask the ranks to save and end. Returns whether it is written: a disk may refuse for a time."""
    try:
        asked.ask()
    except OSError:
        return False
    return True


def _await_ranks(record: RunRecord, signals: StopSignals, seconds: float = 5.0) -> None:
    """Give processes that are just ending the time to."""
    deadline = time.monotonic() + seconds
    while processes_of(record.run_id) and time.monotonic() < deadline and signals.count < 2:
        time.sleep(POLL_SECONDS)


def _prepare_again(prepare: Prepare, overrides: Sequence[str], before: Launch) -> Launch:
    """The launch again; the one before where a file is being edited just now."""
    try:
        return prepare(overrides)
    except SgtError as error:
        _say(f"keeping the settings of the previous start: {error}")
        return before


def _pause(seconds: float, signals: StopSignals, asked: StopAsked) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not signals.count and not asked.is_set():
        time.sleep(POLL_SECONDS)


def _end(run_dir: Path, status: int, reason: str, data_end_step: int | None = None) -> int:
    # A refused start has changed nothing of a run that was trained before.
    if status != BAD_INPUT or not RunLayout(run_dir).has_begun():
        with suppress(OSError):  # it is for people: the run itself ended as it did
            control = RunLayout(run_dir).control
            write_outcome(control, status, reason, data_end_step=data_end_step)
    if status != BAD_INPUT:  # the rank has said in one line what is wrong
        _say(reason)
    return status


def _say(text: str) -> None:
    print(f"sgt-ds train: {text}", file=sys.stderr, flush=True)
