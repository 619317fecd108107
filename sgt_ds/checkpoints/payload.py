"""The files that DeepSpeed itself writes: written hashed and synced, read without running pickles.

DeepSpeed asks its engine's `checkpoint_engine` for every write and read. Ours takes that place for
the length of one save or load: a failed write is kept for later instead of raised in the middle of
DeepSpeed's collectives, and a read refuses everything that is not a tensor or a known plain type.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from sgt_ds.checkpoints.manifest import FileRecord
from sgt_ds.errors import UserError

# The classes that `pickles.ALLOWED_NAMES` names.
ALLOWED_GLOBALS = [ZeroStageEnum, fragment_address, LossScaler, DynamicLossScaler]


class HashingFile(io.RawIOBase):
    """A file open for writing that hashes what passes through it.

    The hash is that of the bytes the program meant to write, so reading the file back tells
    whether the disk holds them.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__()
        self._stream = stream
        self._digest = xxhash.xxh3_128()
        self._size = 0

    def writable(self) -> bool:
        """Whether it takes bytes: yes."""
        return True

    def write(self, piece: Any) -> int:
        """Write and hash one piece (bytes-like)."""
        self._digest.update(piece)
        written = self._stream.write(piece)
        self._size += written
        return written

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._stream.flush()

    def record(self) -> FileRecord:
        """Size and hash so far."""
        return FileRecord(self._size, self._digest.hexdigest())


@contextmanager
def hashed_file(path: Path) -> Iterator[HashingFile]:
    """Open `path` for writing; it is on the disk when the block ends."""
    with path.open("wb") as stream:
        hashing = HashingFile(stream)
        yield hashing
        stream.flush()
        os.fsync(stream.fileno())


class SafePayload(CheckpointEngine):  # type: ignore[misc]  # deepspeed ships no types
    """DeepSpeed's door to the disk, for one save or load.

    `written`: the files that this rank wrote. `fault`: the first write that failed, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = "sgt-ds"
        self.written: dict[str, FileRecord] = {}
        self.fault: str | None = None

    def create(self, info: object) -> None:
        """DeepSpeed announces a save; nothing to prepare."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder, or keep the reason why not."""
        try:
            Path(path).mkdir(parents=True, exist_ok=exist_ok)
        except OSError as error:
            self._keep(path, error)

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file, or keep the reason why not."""
        target = Path(path)
        try:
            with hashed_file(target) as stream:
                torch.save(state_dict, cast(IO[bytes], stream))
                self.written[target.name] = stream.record()
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            self._keep(path, error)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file; no code in it can run. Raises: UserError."""
        return load_payload(Path(path), map_location)

    def commit(self, info: object) -> bool:
        """DeepSpeed asks whether all is on disk."""
        return self.fault is None

    def _keep(self, path: str, error: Exception) -> None:
        if self.fault is None:
            self.fault = f"{Path(path).name}: {' '.join(str(error).split())}"


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
        raise UserError(path, None, f"cannot be read ({error}); use another checkpoint") from None
