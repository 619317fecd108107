"""Protects a checkpoint that is being read: readers lock its manifest, removal checks the lock.

Where the file system knows no locks, nobody is seen to read. Knows no torch.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sgt_ds.checkpoints.manifest import MANIFEST_NAME


@contextmanager
def being_read(path: Path) -> Iterator[None]:
    """Keep the checkpoint `path` from being removed as an old one for the length of the block."""
    descriptor: int | None = None
    with suppress(OSError):  # what can't be opened is told by who reads it
        descriptor = os.open(path / MANIFEST_NAME, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_being_read(path: Path) -> bool:
    """Whether some process is in a `being_read` of the checkpoint `path`."""
    # Opened for writing: NFS grants an exclusive lock on nothing else.
    try:
        descriptor = os.open(path / MANIFEST_NAME, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
