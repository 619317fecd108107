"""Starts the demo's commands and ends them again, by process id. Knows no step.

Each command runs in a session of its own, so that all that it starts can be found and ended,
even after the process in between is gone.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

from sgt_ds.demo.console import Console
from sgt_ds.errors import SgtError

END_GRACE_SECONDS = 10.0
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class CommandFailed(SgtError):
    """A command of the demo failed. `exit_code` is its own; the message is its last line."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interrupted(BaseException):
    """SIGTERM, SIGINT or SIGHUP came: end what runs, and leave."""


def program(name: str) -> str:
    """Path of a console script of this Python's environment, or its bare name."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or name


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGTERM, SIGINT and SIGHUP into `Interrupted` inside the block."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Running:
    """A command that runs, with its output line by line. Leaving the block ends what is left of it.

    `log`: file that gets all of its output.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self._lines: queue.Queue[str] = queue.Queue()
        self._log = log.open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            argv,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._readers = [
            threading.Thread(target=self._read, args=(stream, kept), daemon=True)
            for stream, kept in (
                (self._process.stdout, self.stdout),
                (self._process.stderr, self.stderr),
            )
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        for reader in self._readers:
            reader.join()  # nobody holds the pipes any more
        self._log.close()

    def next_line(self, timeout_seconds: float) -> str | None:
        """The next line of either stream, "" if none came in time, None when it has ended."""
        try:
            return self._lines.get(timeout=timeout_seconds)
        except queue.Empty:
            # A process that outlives the command may hold its pipes: don't wait for their end.
            return "" if self._process.poll() is None else None

    def wait(self) -> int:
        """Wait for its end. Returns the exit status, 128 + n for signal n."""
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def end(self) -> None:
        """End it and everything that it started: SIGTERM, and SIGKILL after a grace."""
        for number, grace in ((signal.SIGTERM, END_GRACE_SECONDS), (signal.SIGKILL, 2.0)):
            for process_id in self._members():
                with suppress(ProcessLookupError):
                    os.kill(process_id, number)
            until = time.monotonic() + grace
            while self._members() and time.monotonic() < until:
                time.sleep(0.1)

    def _members(self) -> list[int]:
        """Process ids of the command's session that still run."""
        self._process.poll()  # a zombie of ours would count as running
        return [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and _session_of(entry) == self._process.pid
        ]

    def _read(self, stream: IO[str], kept: list[str]) -> None:
        for line in stream:
            line = line.rstrip()
            self._log.write(line + "\n")
            self._log.flush()
            if line:
                kept.append(line)
                self._lines.put(line)


def run(
    console: Console,
    argv: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a short command to its end; its stderr shows as progress. Returns its stdout.

    Raises: CommandFailed with its exit status and the last line that it wrote on stderr.
    """
    console.command(argv, environment or {})
    with Running(argv, environment or {}, log) as command:
        while (line := command.next_line(0.2)) is not None:
            # Its error line is shown once, at the end.
            if line and line in command.stderr[-1:] and not line.startswith("sgt-ds"):
                console.progress(line)
        code = command.wait()
    if code:
        raise CommandFailed((command.stderr or [f"{argv[0]}: no output; see {log}"])[-1], code)
    return "\n".join(command.stdout)


def _session_of(entry: Path) -> int | None:
    """Session of the process that `/proc/PID` describes, None where it is gone or a zombie."""
    try:
        # pid (name) state parent group session …; the name may hold spaces and brackets.
        fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[3])
