"""SIGTERM delivered to a thread while training waits in a library. Knows no run."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType


class Sigterm:
    """What ends a rank because another one fell says so by SIGTERM, and kills it a second later.

    Python's own handlers run in the main thread alone, which may wait in a collective forever.
    From the main thread: construct, and `release`.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._comes = select.poll()
        self._comes.register(self._reader, select.POLLIN)
        self._handler_before = signal.signal(signal.SIGTERM, _nothing)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until `wake`. Returns whether a SIGTERM came."""
        self._comes.poll(1000 * seconds)
        try:
            return signal.SIGTERM in os.read(self._reader, 1024)
        except BlockingIOError:
            return False

    def wake(self) -> None:
        """End a wait."""
        os.write(self._writer, b"\0")

    def is_unhandled(self) -> bool:
        """Whether nothing else has taken the signal over: it must end the process then."""
        return signal.getsignal(signal.SIGTERM) is _nothing

    def release(self) -> None:
        """Give the signal back, unless something else has taken it over."""
        signal.set_wakeup_fd(self._wakeup_before)
        if self.is_unhandled():
            signal.signal(signal.SIGTERM, self._handler_before)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Without a handler the process would end before the thread could see why."""
