"""Whether a rank's device can hold what the plan says a rank needs. Knows no engine."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

import torch

from sgt_ds.config import TrainingConfig
from sgt_ds.flops import Memory

log = logging.getLogger(__name__)

# Of a container, in cgroup v2: bytes, or `max`.
_LIMIT = Path("/sys/fs/cgroup/memory.max")


def say_what_memory_lacks(
    planned: Memory, training: TrainingConfig, device: torch.device, local_size: int
) -> None:
    """Warn where a rank's peak by plan is more than its device has: it would end mid-run.

    `local_size`: ranks that share this host.
    """
    size, what = _device_bytes(device, local_size)
    if planned.total <= size:
        return
    mend = "lower training.micro_batch_size"
    if not training.activation_checkpointing:
        mend += ", or set training.activation_checkpointing: true"
    log.warning(
        "memory: a rank needs %.1f GiB at its peak by `sgt-ds plan`, and %s has %.1f GiB; %s",
        planned.total / 2**30,
        what,
        size / 2**30,
        mend,
    )


def _device_bytes(device: torch.device, local_size: int) -> tuple[int, str]:
    """A GPU's memory, or this rank's share of its host's; and whose that is."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory, "its GPU"
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        size = min(size, int(_LIMIT.read_text(encoding="ascii")))
    return size // local_size, "its share of this host"
