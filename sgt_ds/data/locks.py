"""Who may write to an unfinished set: one coordinator, and only workers of its own attempt.

A coordinator that is killed leaves workers that notice at their next word to it; the next attempt
waits for those. Knows files and flock, nothing of the work.
"""

from __future__ import annotations

import errno
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from sgt_ds.errors import UserError

ORPHANS_SECONDS = 60.0
"""How long the workers of a killed attempt may take to notice: one large document."""
# Some cluster file systems are mounted without locks: there, two attempts at once are the user's.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def coordinator_lock(out: Path, work: Path) -> Iterator[None]:
    """Be the only coordinator of `out`, and wait until no worker of an earlier one is left.

    Raises: UserError where another one is at work.
    """
    work.mkdir(exist_ok=True)
    message = "is being prepared by another process; wait for it, or end it"
    with (work / "lock").open("w") as lock:
        if not _lock(lock, fcntl.LOCK_EX):
            raise UserError(out, None, message)
        with (work / "workers").open("w") as workers:
            deadline = time.monotonic() + ORPHANS_SECONDS
            while not _lock(workers, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise UserError(out, None, f"a worker of an earlier attempt: {message}")
                time.sleep(0.02)
        yield


def worker_lock(work: Path) -> IO[str]:
    """Say that this process is a worker, until the file returned is closed or the process ends."""
    stream = (work / "workers").open("w")
    _lock(stream, fcntl.LOCK_SH)
    return stream


def _lock(stream: IO[str], kind: int) -> bool:
    """Whether the lock was got, at once."""
    try:
        fcntl.flock(stream, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
