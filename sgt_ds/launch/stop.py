"""Stops a run from outside its supervisor: asks, waits, and kills exactly what is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from sgt_ds.config import RunLayout, load_run_config
from sgt_ds.errors import SgtError, UserError, refusal
from sgt_ds.files import lock_is_held
from sgt_ds.launch.ends import last_checkpoint, newest_step
from sgt_ds.launch.processes import on_hosts, processes_of
from sgt_ds.launch.record import RunRecord, StopAsked, read_record, remove_record
from sgt_ds.launch.run_processes import end_everywhere
from sgt_ds.launch.supervisor import POLL_SECONDS
from sgt_ds.telemetry import read_outcome

REMOTE_POLL_SECONDS = 5.0

T = TypeVar("T")


def stop(run_dir: Path, *, grace_seconds: float, say: Callable[[str], None]) -> str:
    """Ask a run to save and end; after `grace_seconds` kill what is left. Returns what happened.

    The processes of a raw launcher are not known here, and only asked.
    Raises: UserError where no run is in progress; SgtError where it had to be killed, or may not
    be dead.
    """
    if not RunLayout(run_dir).is_there():
        fault = "holds no run" if run_dir.is_dir() else "no such run"
        raise UserError(run_dir, None, f"{fault}; give the `run_dir` of its YAML")
    record = read_record(run_dir)
    if record is None:
        check_not_complete(run_dir, "to stop")
        if lock_is_held(RunLayout(run_dir).training_lock):
            return _stop_raw(RunLayout(run_dir), grace_seconds, say)
    if record is None or (not (attended := _supervisor_lives(record)) and not _count(record)):
        raise UserError(
            run_dir,
            None,
            "no run is in progress on this host; to stop one that `deepspeed` itself started on "
            f"others, create the file {RunLayout(run_dir).stop_request}",
        )
    asked = _ask(run_dir, StopAsked(run_dir).ask, grace_seconds, say)
    deadline = time.monotonic() + grace_seconds
    ended = False
    while not ended and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS if not record.remote_hosts else REMOTE_POLL_SECONDS)
        # A supervisor takes its record away when everything is over.
        ended = read_record(run_dir) is None if attended else not _count(record)
    if ended:
        _tidy(run_dir, record)
        return _told_end(run_dir, since=0) if attended else f"ended; {last_checkpoint(run_dir)}"
    saved = read_outcome(RunLayout(run_dir).control)
    left = end_everywhere(record)
    _await_supervisor(record)
    _tidy(run_dir, record)
    if left:
        raise SgtError(f"{run_dir}: killed, but some processes may remain: {'; '.join(left)}")
    if saved is not None and saved.status == 0 and saved.written >= asked:
        return saved.reason  # the ranks only waited for their scrapers
    raise SgtError(
        f"{run_dir}: did not exit within {grace_seconds:.0f} s and was killed; "
        f"{last_checkpoint(run_dir)}"
    )


def _ask(
    run_dir: Path, ask: Callable[[], T], grace_seconds: float, say: Callable[[str], None]
) -> T:
    """Ask by `ask`. Returns what it does. Raises: UserError where the system refuses."""
    try:
        answer = ask()
    except OSError as error:
        raise UserError(run_dir, None, refusal(error, "asked to stop")) from None
    say(f"asked the ranks to save and exit; waiting up to {grace_seconds:.0f} s")
    return answer


def _stop_raw(layout: RunLayout, grace_seconds: float, say: Callable[[str], None]) -> str:
    """`stop` of a run under the raw launcher, whose rank 0 is on this host."""
    _ask(layout.run_dir, layout.stop_request.touch, grace_seconds, say)
    asked = 0.0
    with suppress(OSError):  # obeyed by now
        asked = layout.stop_request.stat().st_mtime  # by the clock that dates outcomes
    deadline = time.monotonic() + grace_seconds
    try:
        while lock_is_held(layout.training_lock):
            if time.monotonic() > deadline:
                raise SgtError(
                    f"{layout.run_dir}: has not exited within {grace_seconds:.0f} s; it is under "
                    "the raw launcher: end that by its process id"
                )
            time.sleep(POLL_SECONDS)
    finally:  # left behind, it would end the next start before its first update
        layout.stop_request.unlink(missing_ok=True)
    return _told_end(layout.run_dir, since=asked)


def _told_end(run_dir: Path, since: float) -> str:
    """How the run says it ended, if it has since then. Raises: SgtError where it failed."""
    outcome = read_outcome(RunLayout(run_dir).control)
    if outcome is None or outcome.written < since:
        return f"ended; {last_checkpoint(run_dir)}"
    if outcome.status:
        raise SgtError(f"{run_dir}: {outcome.reason}")
    return outcome.reason


def check_not_complete(run_dir: Path, nothing: str) -> None:
    """Raises: UserError where the run has nothing left to do, and no one trains it.

    `nothing`: what there is not to do about it, as "to stop".
    """
    layout = RunLayout(run_dir)
    try:
        steps = load_run_config(layout.config).training.steps
    except UserError:
        return
    outcome, last, why = read_outcome(layout.control), steps, ""
    if outcome is not None and outcome.data_end_step is not None:
        last, why = outcome.data_end_step, ": its data have ended"
    if newest_step(layout) >= last and not lock_is_held(layout.training_lock):
        message = f"is complete at step {last:,} of {steps:,}{why}; there is nothing {nothing}"
        raise UserError(run_dir, None, message)


def _supervisor_lives(record: RunRecord) -> bool:
    if record.host != os.uname().nodename:
        return False
    try:
        os.kill(record.pid, 0)
        command = (Path("/proc") / str(record.pid) / "cmdline").read_bytes()
    except OSError:
        return False
    return b"sgt" in command


def _count(record: RunRecord) -> int:
    """Processes of the run on all hosts; a host that does not answer counts as one."""
    remote = on_hosts("list", record.run_id, record.remote_hosts, record.ssh_port)
    return len(processes_of(record.run_id)) + sum(
        int(said) if said.isdecimal() else 1 for said in remote.values()
    )


def _await_supervisor(record: RunRecord, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while _supervisor_lives(record) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    if _supervisor_lives(record):
        os.kill(record.pid, signal.SIGTERM)


def _tidy(run_dir: Path, record: RunRecord) -> None:
    """Take away what a killed supervisor could not."""
    if not _supervisor_lives(record):
        StopAsked(run_dir).clear()
        if read_record(run_dir) == record:
            remove_record(run_dir)
