"""What is recorded while a run is supervised: who runs it, where, under which id.

RUN/control/run.json is there while `sgt-ds train` runs; RUN/control/lock is held by it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from sgt_ds.config import RunLayout
from sgt_ds.errors import UserError, refusal
from sgt_ds.files import seems_there, take_lock, write_text_atomically
from sgt_ds.launch.processes import is_run_id


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A supervised run. `remote_hosts`: hosts whose processes ssh reaches, from `host`."""

    run_id: str
    pid: int
    host: str
    started: float
    remote_hosts: list[str]
    ssh_port: int | None


def new_record(run_dir: Path, remote_hosts: list[str], ssh_port: int | None) -> RunRecord:
    """A record with a fresh id; the run's name is in it, for people who read process lists."""
    name = "".join(
        character if character.isalnum() and character.isascii() else "-"
        for character in run_dir.resolve().name[:40]
    )
    return RunRecord(
        f"sgt.{name}.{secrets.token_hex(8)}",
        os.getpid(),
        socket.gethostname(),
        time.time(),
        remote_hosts,
        ssh_port,
    )


def write_record(run_dir: Path, record: RunRecord) -> None:
    """Write RUN/control/run.json."""
    write_text_atomically(_path(run_dir), json.dumps(asdict(record)) + "\n")


def remove_record(run_dir: Path) -> None:
    """The run has ended: take its record away. Raises: OSError."""
    _path(run_dir).unlink(missing_ok=True)


def read_record(run_dir: Path) -> RunRecord | None:
    """The record of a run in progress, or of one whose supervisor was killed; None without one.

    Raises: UserError where the file holds something else.
    """
    path = _path(run_dir)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        record = RunRecord(**values)
        if not is_run_id(record.run_id):
            raise ValueError("run_id")
        if not all(isinstance(host, str) for host in record.remote_hosts):
            raise ValueError("remote_hosts")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(path, None, f"is not as written by sgt-ds ({error}); remove it") from None
    return record


class StopAsked:
    """Whether a run was asked to stop, for as long as its supervisor lives.

    The ranks look for RUN/control/stop and take it away once they have saved, so a mark of the
    supervisor's own, RUN/control/asked, remembers it. A folder that does not answer asks for nothing.
    """

    def __init__(self, run_dir: Path) -> None:
        self._request = RunLayout(run_dir).stop_request
        self._mark = self._request.with_name("asked")

    def ask(self) -> float:
        """Ask the ranks to save and end. Returns when, by the clock that dates outcomes."""
        self._request.parent.mkdir(parents=True, exist_ok=True)
        self._mark.touch()
        asked = self._mark.stat().st_mtime
        self._request.touch()
        return asked

    def is_set(self) -> bool:
        """Whether `ask` was called by anybody, or someone made the request's file by hand."""
        return seems_there(self._mark) or seems_there(self._request)

    def clear(self) -> None:
        """Take request and mark away. Raises: OSError."""
        for path in (self._request, self._mark):
            path.unlink(missing_ok=True)


@contextmanager
def supervision(run_dir: Path) -> Iterator[None]:
    """Hold the run for the length of the block. Raises: UserError where another process holds it.

    The kernel lets go when the process dies, however it dies.
    """
    lock = RunLayout(run_dir).supervisor_lock
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = take_lock(lock)
    except OSError as error:
        message = refusal(error, "written")
        raise UserError(error.filename or run_dir, "run_dir", message) from None
    if descriptor is None:
        raise in_training(run_dir)
    try:
        yield
    finally:
        os.close(descriptor)


def in_training(run_dir: Path) -> UserError:
    """What is said where another `sgt-ds train` holds the run."""
    record = read_record(run_dir)
    who = "" if record is None else f" (process {record.pid} on {record.host})"
    return UserError(
        run_dir, "run_dir", f"is being trained{who}; `sgt-ds stop {run_dir}` ends that run"
    )


def _path(run_dir: Path) -> Path:
    return RunLayout(run_dir).control / "run.json"
