"""Atomic file writes, and files that grow by complete lines. Imports no package."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from sgt_ds.errors import UserError, refusal

log = logging.getLogger(__name__)

# Hours of a large model's lines: a run that can't write them for longer saves nothing either.
MAX_WAITING_BYTES = 256 << 20
# Some hundred updates of a large model's lines.
MAX_UNSYNCED_BYTES = 16 << 20


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
    # Containers count processes each for itself.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        fsync_directory(path.parent)
    except OSError as error:
        if str(error.filename) != str(temporary):
            raise
        # No reader knows that name.
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with suppress(OSError):  # as where its folder is none, which is being told
            temporary.unlink(missing_ok=True)


@contextmanager
def output_writer(path: Path) -> Iterator[IO[bytes]]:
    """As `atomic_writer`, for a file that a user names: it follows links.

    What is there and is no regular file, as a pipe or a device, is written into, never replaced,
    and so is a file that stdout or the like holds open.
    """
    if _is_held_open(path) or (path.exists() and not path.is_file()):
        with _open_at_its_end(path) as stream:
            yield stream
    else:
        with atomic_writer(Path(os.path.realpath(path))) as stream:
            yield stream


def _is_held_open(path: Path) -> bool:
    """Whether `path` is `/dev/stdout` or the like: it leads through a link of /proc."""
    for _ in range(40):  # links; Linux follows no more
        if not path.is_symlink():
            return False
        folder = os.path.realpath(path.parent)
        if folder.startswith("/proc/"):
            return True
        path = Path(folder, path.readlink())
    return False


def _open_at_its_end(path: Path) -> IO[bytes]:
    """Open `path` for what follows. What stdout or stderr leads to goes by the same position."""
    found = path.stat()
    for descriptor in (1, 2):
        with suppress(OSError):  # closed by who started this
            if os.path.samestat(found, os.fstat(descriptor)):
                return os.fdopen(os.dup(descriptor), "wb")
    return path.open("ab")


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


def lock_is_held(path: Path) -> bool:
    """Whether another process holds `path`, or this one by another descriptor. Makes no file."""
    try:
        descriptor = take_lock(path) if path.exists() else -1
    except OSError:  # whoever takes it will be told
        return False
    if descriptor is not None and descriptor >= 0:
        os.close(descriptor)
    return descriptor is None


def truncate(path: Path, size: int) -> None:
    """Keep the first `size` bytes of a file, on the disk on return. Raises: OSError."""
    with path.open("r+b") as stream:
        stream.truncate(size)
        os.fsync(stream.fileno())


class LineFile:
    """A file of lines that grows, and outlives a full disk: what can't be written waits in memory.

    Lines are in the file whole and in order, or not at all. They survive the process once written,
    and a power cut once synced: until then they are kept in memory too, since some file systems
    refuse only there what they took before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._synced = os.fstat(self._descriptor).st_size  # bytes of what is whole
        self._written = bytearray()  # after them
        self._waiting = bytearray()  # not in the file
        self.fault: str | None = None
        """Why lines wait, where the last `offer` could not write them."""

    def add(self, line: str) -> None:
        """Note one line, with its newline."""
        self._waiting += line.encode()

    def flush(self) -> None:
        """Write what was noted. Raises: OSError where that fails, and it still waits."""
        self._write()
        if len(self._written) > MAX_UNSYNCED_BYTES:
            self.sync()

    def _write(self) -> None:
        if not self._waiting:
            return
        try:
            # What an earlier attempt left half-written goes first.
            self._cut_to_size()
            rest = memoryview(bytes(self._waiting))
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            with suppress(OSError):
                self._cut_to_size()
            raise
        self._written += self._waiting
        self._waiting.clear()

    def sync(self) -> None:
        """As `flush`, and make it survive a power cut. Raises: OSError, and all of it waits."""
        self._write()
        try:
            os.fsync(self._descriptor)
        except OSError:
            # The system tells this once, and may have dropped what it could not write.
            self._waiting[:0] = self._written
            self._written.clear()
            with suppress(OSError):
                self._cut_to_size()
            raise
        self._synced += len(self._written)
        self._written.clear()

    def offer(self, *, sync: bool = False) -> None:
        """`flush` or `sync`, or keep it all for the next time; says when that begins and ends.

        Raises: OSError once more than `MAX_WAITING_BYTES` wait.
        """
        try:
            # After a refusal only a sync tells whether the disk takes lines again.
            if sync or self.fault is not None:
                self.sync()
            else:
                self.flush()
        except OSError as error:
            if self.fault is None:
                log.warning(
                    "%s can't be written (%s); its lines are kept in memory",
                    self.path,
                    error.strerror,
                )
            self.fault = f"{self.path.name}: {error.strerror}"
            if len(self._waiting) > MAX_WAITING_BYTES:
                raise
            return
        if self.fault is not None:
            log.warning("%s can be written again; all lines kept in memory are on disk", self.path)
        self.fault = None

    def cut(self, size: int) -> None:
        """Keep the first `size` bytes of what is written, synced. Raises: OSError."""
        self._synced = size
        self._written.clear()
        self._cut_to_size()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """`sync`, and close the file; says so where lines are lost."""
        try:
            self.sync()
        except OSError as error:
            log.warning("%s: its last lines may be lost (%s)", self.path, error.strerror)
            with suppress(OSError):  # where readers find them, for as long as the system lives
                self._write()
        os.close(self._descriptor)

    def _cut_to_size(self) -> None:
        size = self._synced + len(self._written)
        if os.fstat(self._descriptor).st_size != size:
            os.ftruncate(self._descriptor, size)


@contextmanager
def writing(path: Path, field: str | None = None) -> Iterator[None]:
    """For a start, which has nothing to lose yet. Raises: UserError where the disk refuses.

    `field`: the setting that names `path`.
    """
    try:
        yield
    except OSError as error:
        message = refusal(error, "written", instead="choose another run_dir")
        raise UserError(path, field, message) from None


def seems_there(path: Path) -> bool:
    """Whether it is there; False too where the file system does not answer. Raises nothing."""
    return os.path.exists(path)  # noqa: PTH110 - Path's own passes OSError on
