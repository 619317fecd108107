"""Limits the cache of remote sets: sets not in use are evicted, least recently used first.

Knows folders, times and sizes, no store. A set is in use as long as any process has it open.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sgt_ds.data.manifest import NAME, read_manifest
from sgt_ds.errors import UserError
from sgt_ds.files import take_lock

USED = ".in-use"
_SET = re.compile(r"[0-9a-f]{32}")


def hold(directory: Path, holder: object) -> None:
    """Make a set's folder, and keep it from being emptied as long as `holder` lives.

    Raises: OSError.
    """
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(directory / USED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # removed between the two
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            os.utime(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), (directory / USED).stat()):
                weakref.finalize(holder, os.close, descriptor)
                return
        os.close(descriptor)  # what was locked had just been removed


def note_use(directory: Path) -> None:
    """A set that is read for weeks was last used now, not when it was opened."""
    with suppress(OSError):
        os.utime(directory / USED)


@contextmanager
def alone(directory: Path, name: str) -> Iterator[int]:
    """Hold a file's lock: of all processes and threads that share the cache, one works on it.

    Yields its descriptor. The system lets go of a lock whose holder died.
    """
    descriptor = os.open(directory / _lock_name(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def note_whole(lock: int) -> None:
    """Note that the file whose lock is held has been read now, and is what it should be."""
    os.pwrite(lock, f"{time.time():.6f}".encode(), 0)


def whole_at(lock: int) -> float:
    """When that was noted last; 0: never."""
    return _time(os.pread(lock, 32, 0))


def make_room(root: Path, limit: int) -> list[Path]:
    """Remove files of sets that no one reads until all sets take `limit` bytes or less.

    A set in use counts with all its shards, fetched or not. Returns what was removed. Where sets in
    use need more, all others go. Raises: OSError.
    """
    if not root.is_dir():
        return []
    # One process at a time, or each would remove as much.
    with alone(root, "room"):
        sets = [_Set.at(path) for path in root.iterdir() if _SET.fullmatch(path.name)]
        surplus = sum(each.size for each in sets) - limit
        removed: list[Path] = []
        for each in sorted(sets, key=lambda one: one.used):
            if surplus <= 0:
                break
            gone, freed = each.shrink(surplus)
            removed += gone
            surplus -= freed
    return removed


def check_limit(directories: dict[Path, int], limit: int) -> None:
    """Raises: UserError where the sets that a run reads, bytes by folder, exceed the limit."""
    needed = sum(directories.values())
    if needed > limit:
        raise UserError(
            "data.cache_bytes",
            None,
            f"{limit} is less than the {needed} bytes of the remote sets that data and evaluation "
            f"name; set {needed} or more, or null",
        )


@dataclass(frozen=True)
class _Set:
    directory: Path
    files: dict[Path, tuple[float, int]]
    """Last found whole, and bytes."""
    used: float
    size: int
    """Bytes that it takes, or will take where it is in use."""

    @classmethod
    def at(cls, directory: Path) -> _Set:
        files: dict[Path, tuple[float, int]] = {}
        with suppress(FileNotFoundError):  # removed by hand
            for path in directory.iterdir():
                if path.is_file() and (not path.name.startswith(".") or path.suffix == ".tmp"):
                    found = path.stat()
                    whole = directory / _lock_name(path.name)
                    noted = _time(whole.read_bytes()) if whole.exists() else 0.0
                    files[path] = (noted, found.st_size)
        size = sum(size for _, size in files.values())
        used = _seconds(directory / USED) or _seconds(directory)
        if files and (lock := take_lock(directory / USED)) is None:
            with suppress(UserError):
                size = sum(shard.bytes for shard in read_manifest(directory).shards)
        elif files and lock is not None:
            os.utime(lock, (used, used))
            os.close(lock)
        return cls(directory, files, used, size)

    def shrink(self, surplus: int) -> tuple[list[Path], int]:
        """Remove the longest unused files, if nobody has the set open: which, and their bytes."""
        if not self.files or (lock := take_lock(self.directory / USED)) is None:
            return [], 0
        try:
            removed, freed = [], 0
            shards = self.files.keys() - {self.directory / NAME}
            for path in sorted(shards, key=lambda one: (one.suffix != ".tmp", self.files[one])):
                if freed >= surplus:
                    break
                path.unlink(missing_ok=True)
                removed.append(path)
                freed += self.files[path][1]
            if len(removed) == len(shards):
                shutil.rmtree(self.directory)
                freed = self.size
            return removed, freed
        finally:
            os.close(lock)


def _lock_name(name: str) -> str:
    return f".{name}.lock"


def _time(noted: bytes) -> float:
    try:
        return float(noted)
    except ValueError:
        return 0.0


def _seconds(path: Path) -> float:
    """When a file was last changed; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
