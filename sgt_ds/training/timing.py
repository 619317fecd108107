"""Times work on a device, where what was queued is done only once the host has waited for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(
    device: torch.device,
    work: Callable[[], object],
    *,
    warm_up: int,
    rounds: int,
    before: Callable[[], object] = lambda: None,
) -> float:
    """Median over `rounds`, those of `warm_up` left out. `before`: each, outside of the time."""
    times = []
    for _ in range(warm_up + rounds):
        before()
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[warm_up:])
