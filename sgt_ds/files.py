"""Files that are whole or absent: temporary name, fsync, rename. Knows no room."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def fsync_directory(path: Path) -> None:
    """Make a rename or a new name in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_writer(path: Path) -> Iterator[IO[bytes]]:
    """Open a binary file that appears under `path` only if the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        fsync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` (UTF-8) to `path`, whole or not at all."""
    with atomic_writer(path) as stream:
        stream.write(text.encode())


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex, read in 1 MiB pieces."""
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def take_lock(path: Path) -> int | None:
    """Hold `path` against all other processes; None where one of them holds it.

    The descriptor returned lets go when it is closed, or when the process dies, however it dies.
    Raises: OSError where the file can't be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor
