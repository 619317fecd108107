"""Time in each phase of an update, as operators see it. Never waits for a device.

On a GPU a part is bracketed by CUDA events on the current stream, which are read once they have
passed; on a CPU, and for what the host does, by the host's clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sgt_ds.telemetry import STEP_PARTS, DeviceMemory


class StepParts:
    """Seconds by part (`telemetry.STEP_PARTS`), since this process began."""

    def __init__(self, device: torch.device, entered: Callable[[str], None]) -> None:
        """`entered`: told the name of each part as it begins."""
        self._entered = entered
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._seconds = dict.fromkeys(STEP_PARTS, 0.0)
        self._passing: deque[tuple[str, str | None, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []

    @contextmanager
    def host(self, part: str, within: str | None = None) -> Iterator[None]:
        """Count the host's time in the block to `part`, and not to the part around it."""
        self._entered(part)
        started = time.perf_counter()
        try:
            yield
        finally:
            self._add(part, within, time.perf_counter() - started)

    @contextmanager
    def device(self, part: str, within: str | None = None) -> Iterator[None]:
        """Count the device's time in the block to `part`, and not to the part around it."""
        if not self._on_gpu:
            with self.host(part, within):
                yield
            return
        self._entered(part)
        begin, end = self._event(), self._event()
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._passing.append((part, within, begin, end))

    def time_reduction(self, engine: Any) -> None:
        """Time what `engine.backward` waits for at its end, gradients on their way, as `reduce`."""
        reduce = engine.allreduce_gradients

        def timed(*arguments: Any, **options: Any) -> None:
            with self.device("reduce", within="backward"):
                reduce(*arguments, **options)

        engine.allreduce_gradients = timed

    def read_passed(self) -> None:
        """Count what the device has passed by now. Asks it, and does not wait."""
        while self._passing and self._passing[0][3].query():  # type: ignore[no-untyped-call]
            part, within, begin, end = self._passing.popleft()
            self._add(part, within, begin.elapsed_time(end) / 1000)
            self._free += (begin, end)

    def seconds(self) -> dict[str, float]:
        """By part, as far as it has been read."""
        # What lies within another part may have been read before the rest of that one.
        return {part: max(0.0, seconds) for part, seconds in self._seconds.items()}

    def device_memory(self) -> DeviceMemory | None:
        """As the allocator counts it; None on a CPU."""
        if not self._on_gpu:
            return None
        return DeviceMemory(
            allocated=torch.cuda.memory_allocated(self._device),
            reserved=torch.cuda.memory_reserved(self._device),
            peak=torch.cuda.max_memory_allocated(self._device),
            size=torch.cuda.get_device_properties(self._device).total_memory,
        )

    def _event(self) -> torch.cuda.Event:
        if self._free:
            return self._free.pop()
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def _add(self, part: str, within: str | None, seconds: float) -> None:
        self._seconds[part] += seconds
        if within is not None:
            self._seconds[within] -= seconds
