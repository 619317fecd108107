"""The files of a run directory that the trainer writes: metrics.jsonl, logs, its lock."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sgt_ds.config import RunLayout
from sgt_ds.errors import UserError, refusal
from sgt_ds.files import LineFile, take_lock, writing


@contextmanager
def only_trainer(run_dir: Path) -> Iterator[None]:
    """Hold the run directory for the length of the block: two runs in it would mix their files.

    Raises: UserError where another process holds it, or where it can't be written.
    """
    lock = RunLayout(run_dir).training_lock
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = take_lock(lock)
    except OSError as error:
        message = refusal(error, "written", instead="choose another")
        raise UserError(error.filename or run_dir, "run_dir", message) from None
    if descriptor is None:
        message = f"is being trained by another process; `sgt-ds stop {run_dir}` ends that run"
        raise UserError(run_dir, "run_dir", message)
    try:
        yield
    finally:
        os.close(descriptor)


class _LogFile(logging.FileHandler):
    """A log whose lines a full disk may cost; what cannot be written is no reason for more text."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Leave the line out where the disk refused it."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _Terminal(logging.StreamHandler):  # type: ignore[type-arg]  # it takes one from 3.11 on
    """The log on stdout: what refuses a line there (a full disk) is told once; the file has all."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Tell the first line that the stream refused, and leave out the others."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            with suppress(OSError, ValueError):  # stderr may be on the same disk
                said = f"sgt-ds train: cannot write the log to stdout ({error.strerror or error})"
                print(said, file=sys.stderr, flush=True)


def set_up_logging(run_dir: Path, rank: int) -> logging.Logger:
    """Log of this rank: a file of its own, and the terminal as well on rank 0.

    Raises: UserError where the file cannot be written.
    """
    logger = logging.getLogger("sgt_ds")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    path = RunLayout(run_dir).logs / f"rank-{rank:05d}.log"
    with writing(path):
        to_file = _LogFile(path)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(to_file)
    to_terminal = _Terminal(sys.stdout)
    to_terminal.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    to_terminal.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(to_terminal)
    return logger


def kept_rows(path: Path, step: int) -> int:
    """Bytes of metrics.jsonl up to `step`: to the first row past it, or to a torn end.

    A damaged row before good ones stays: what was written after it is no less true.
    """
    keep = end = 0
    with path.open("rb") as stream:
        for line in stream:
            end += len(line)
            at = _step_of(line)
            if at is None:
                continue
            if at > step:
                break
            keep = end
    return keep


def _step_of(line: bytes) -> int | None:
    """The step of a whole row; None where it is torn or damaged."""
    try:
        at = json.loads(line)["step"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return at if isinstance(at, int) and line.endswith(b"\n") else None


class MetricsFile:
    """metrics.jsonl: one JSON object a line, in order of steps."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; it reaches the system before this returns, or waits for a full disk."""
        self._file.add(json.dumps(row) + "\n")
        self._file.offer()

    def sync(self) -> None:
        """Have the rows survive a power cut, or wait for a full disk."""
        self._file.offer(sync=True)

    def cut_back(self, step: int) -> None:
        """Drop every row past `step`, and a torn last line."""
        self._file.cut(kept_rows(self._file.path, step))

    def close(self) -> None:
        """Make the rows survive a power cut, and close the file."""
        self._file.close()
