"""Host memory allocated during training: touched, and page-locked where CUDA is available.

New memory costs ten times as much as the copy into it: the system finds and clears page by page.
Knows no checkpoint.
"""

from __future__ import annotations

import ctypes
import logging
from threading import Event, Thread

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_PAGE_BYTES = 4096
# Touched between two looks at whether it is still wanted: some 10 ms.
_TOUCH_BYTES = 1 << 24
# Page-locked at a time, so that training's own calls of the driver need not wait for all of it.
_LOCK_BYTES = 1 << 28
# For a thread that ends within two such pieces, unless locking waits for the device too.
_STOP_SECONDS = 5.0
_PORTABLE = 1  # cudaHostRegisterPortable


class HostMemory:
    """`size` bytes, got by a thread from now on. `wait` before anything is copied into it.

    Exactly as much as is asked for: what torch's own page-locked allocator gives is rounded up to a
    power of two.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.fault: str | None = None
        """Why there is no memory, once it has been waited for; None where there is."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._locked: list[int] = []  # addresses
        self._unwanted = Event()
        # A thread begins with device 0, and would open a context on it.
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        # CUDA keeps an error of page-locking for the thread that met it: not for training's.
        self._thread = Thread(target=self._get, name="checkpoint-memory", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it is there, or `fault` says why not."""
        self._thread.join()

    def stop(self) -> None:
        """Stop getting it. What is locked stays locked: unlocking may wait for the device, and that
        for a rank that is gone.
        """
        self._unwanted.set()
        self._thread.join(timeout=_STOP_SECONDS)

    def close(self) -> None:
        """Unlock it, or stop getting it. What has been copied stays as long as it is in use."""
        self._unwanted.set()
        self._thread.join()
        while self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._locked.pop())  # type: ignore[no-untyped-call]

    def copy(self, offset: int, source: Tensor) -> Tensor:
        """A copy of `source` (uint8, not empty) at `offset`; a device's may be on its way yet."""
        end = offset + source.numel()
        if source.device.type == "cpu":
            # Twice as fast as torch on one thread: past the caches, and not through them.
            ctypes.memmove(self._bytes.data_ptr() + offset, source.data_ptr(), source.numel())
        begin = offset
        while begin < end and source.device.type != "cpu":  # no copy crosses what is locked apart
            until = min(end, (begin // _LOCK_BYTES + 1) * _LOCK_BYTES)
            piece = source[begin - offset : until - offset]
            self._bytes[begin:until].copy_(piece, non_blocking=True)
            begin = until
        # A storage of its own, so that torch.save writes these bytes alone.
        return torch.frombuffer(
            self._bytes.numpy(), dtype=torch.uint8, offset=offset, count=source.numel()
        )

    def _get(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            self._bytes = torch.empty(self.size, dtype=torch.uint8)
        except (MemoryError, RuntimeError) as error:
            self.fault = " ".join(str(error).split()) or "no memory"
            return
        for begin in range(0, self.size, _LOCK_BYTES):
            end = min(self.size, begin + _LOCK_BYTES)
            for at in range(begin, end, _TOUCH_BYTES):
                if self._unwanted.is_set():
                    return
                self._bytes[at : min(end, at + _TOUCH_BYTES) : _PAGE_BYTES].zero_()
            if self._device is not None and not self._lock(begin, end):
                return

    def _lock(self, begin: int, end: int) -> bool:
        address = self._bytes.data_ptr() + begin
        status = torch.cuda.cudart().cudaHostRegister(address, end - begin, _PORTABLE)  # type: ignore[no-untyped-call]
        if int(status):
            log.warning(
                "%.1f GB for the checkpoint copy can't be page-locked (CUDA error %d); training "
                "pauses longer",
                (self.size - begin) / 1e9,
                int(status),
            )
            return False
        self._locked.append(address)
        return True
