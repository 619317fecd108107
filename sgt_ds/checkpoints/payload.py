"""The files DeepSpeed itself writes: taken from it, written with hash and sync, read safely.

DeepSpeed asks its engine's `checkpoint_engine` for every write and read. Ours takes that place for
the length of one save or load: what DeepSpeed saves is only collected, and written later, outside
of its collectives; a read refuses everything that is not a tensor or a known plain type.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import IO, Any, cast

import torch
import xxhash
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from sgt_ds.checkpoints.manifest import FileRecord
from sgt_ds.errors import UserError, refusal

# The classes that `pickles.ALLOWED_NAMES` names.
ALLOWED_GLOBALS = [ZeroStageEnum, fragment_address, LossScaler, DynamicLossScaler]
# Some releases of Python (3.11.2) pickle an enum as a call of getattr, which no safe reader takes.
copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (stage.value,)))


# Written before the disk is waited for. Gigabytes of unwritten pages would hold up everything else
# that this host syncs, and here the training thread's journal too.
SYNC_BYTES = 64 << 20


class Cancelled(OSError):
    """The run ends: what is being written is of no use any more."""


class HashingFile(io.RawIOBase):
    """A file open for writing that hashes what passes through it.

    The hash is that of the bytes the program meant to write, so reading the file back tells
    whether the disk holds them. `cancelled`: once it is set, writing raises Cancelled.
    `fault`: the first error of a write, which torch would replace by one of its own.
    """

    def __init__(self, stream: IO[bytes], cancelled: Event) -> None:
        super().__init__()
        self._stream, self._cancelled = stream, cancelled
        self.fault: OSError | None = None
        self._digest = xxhash.xxh3_128()
        self._size = self._unsynced = 0

    def writable(self) -> bool:
        """Whether it takes bytes: yes."""
        return True

    def write(self, piece: Any) -> int:
        """Write and hash one piece (bytes-like)."""
        whole = memoryview(piece).cast("B")
        try:
            for start in range(0, len(whole), SYNC_BYTES):
                self._put(whole[start : start + SYNC_BYTES])
        except OSError as error:
            self.fault = self.fault or error
            raise
        return len(whole)

    def _put(self, piece: memoryview) -> None:
        """Hash and write at most `SYNC_BYTES`; wait for the disk once that many have been written."""
        if self._cancelled.is_set():
            raise Cancelled("the run ended first")
        self._digest.update(piece)
        left = piece
        while left:
            left = left[self._stream.write(left) :]
        self._size += len(piece)
        self._unsynced += len(piece)
        if self._unsynced >= SYNC_BYTES:
            os.fdatasync(self._stream.fileno())
            self._unsynced = 0

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._stream.flush()

    def record(self) -> FileRecord:
        """Size and hash so far."""
        return FileRecord(self._size, self._digest.hexdigest())


def write_hashed(path: Path, write: Callable[[IO[bytes]], object], cancelled: Event) -> FileRecord:
    """Let `write` fill the file `path`; it is on the disk when this returns. Raises: OSError."""
    # Unbuffered: a write that fails does so here, and not once more when the file is closed.
    with path.open("wb", buffering=0) as stream:
        hashing = HashingFile(stream, cancelled)
        try:
            write(cast("IO[bytes]", hashing))
        except RuntimeError as error:
            raise OSError(str(hashing.fault or error)) from None
        os.fsync(stream.fileno())
        return hashing.record()


class SafePayload(CheckpointEngine):  # type: ignore[misc]  # deepspeed ships no types
    """DeepSpeed's door to the disk, for one save or load: nothing is written here.

    `taken`: what DeepSpeed saved on this rank, by file name, as `copy` gave it. `fault`: why
    something could not be copied and is there as it was, or None.
    """

    def __init__(self, copy: Callable[[Any], Any] = lambda value: value) -> None:
        super().__init__()
        self.name = "sgt-ds"
        self.taken: dict[str, Any] = {}
        self.fault: str | None = None
        self._copy = copy
        self._ahead: dict[str, Any] = {}

    def create(self, info: object) -> None:
        """DeepSpeed announces a save; nothing to prepare."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """DeepSpeed wants a folder; the saver has made it."""

    def save(self, state_dict: Any, path: str) -> None:
        """Take what belongs into one file; in between DeepSpeed's collectives nothing may raise."""
        name = Path(path).name
        try:
            self.taken[name] = self._copy(state_dict)
        except (MemoryError, RuntimeError) as error:
            self.taken[name] = state_dict
            self.fault = self.fault or f"{name}: {' '.join(str(error).split()) or 'no memory'}"

    def look_ahead(self, path: str) -> Any:
        """Read one file now; `load` will give the same. Raises: UserError."""
        self._ahead[path] = self.read(path, "cpu")
        return self._ahead[path]

    def load(self, path: str, map_location: Any = None) -> Any:
        """One file, for DeepSpeed. Raises: UserError."""
        if path in self._ahead:
            return self._ahead.pop(path)
        return self.read(path, map_location)

    def read(self, path: str, map_location: Any) -> Any:
        """Read one file; no code in it can run. Raises: UserError."""
        return load_payload(Path(path), map_location)

    def commit(self, info: object) -> bool:
        """DeepSpeed asks whether all is well."""
        return True


@contextmanager
def safe_payload(engine: Any, payload: SafePayload | None = None) -> Iterator[SafePayload]:
    """Let `engine` (a DeepSpeed engine) write and read through a `SafePayload` in the block."""
    payload, usual = payload or SafePayload(), engine.checkpoint_engine
    engine.checkpoint_engine = payload
    # DeepSpeed copies two scripts beside each save, unsynced and unguarded; they are no part of it.
    engine._copy_recovery_script = lambda save_path: None
    try:
        yield payload
    finally:
        engine.checkpoint_engine = usual
        del engine._copy_recovery_script


def load_payload(path: Path, map_location: Any = "cpu", *, mmap: bool = False) -> Any:
    """Read a file that `torch.save` wrote, with `weights_only=True`.

    `mmap`: leave tensors on the disk until they are used; for a reader that wants a few of them.
    Raises: UserError where it is missing, damaged, or holds anything but tensors and plain values.
    """
    try:
        with torch.serialization.safe_globals(ALLOWED_GLOBALS):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except FileNotFoundError:
        raise UserError(path, None, "is missing; use another checkpoint") from None
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0].split("Please file")[0]
        raise UserError(
            path, None, f"holds more than tensors and was not loaded ({reason}); do not trust it"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise UserError(path, None, refusal(error, "read", "use another checkpoint")) from None
