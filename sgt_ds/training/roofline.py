"""Speed of a device on a plain matrix product and a plain copy: the roofline of a training step.

`deepspeed --module sgt_ds.training.roofline FILE DTYPE` on one rank writes FILE. Knows no model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from sgt_ds.files import write_text_atomically
from sgt_ds.training.timing import median_seconds

WARM_UP, ROUNDS = 3, 7
# Rows of the square matrices, and bytes of the copy: large enough to fill the device.
_SIZES = {"cuda": (8192, 1 << 30), "cpu": (1024, 1 << 26)}
# Products that are queued together, so that the host's calls do not count.
_QUEUED = {"cuda": 8, "cpu": 1}
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class Roofline:
    """What was reached. Medians."""

    product_size: int
    """Rows and columns of both matrices."""
    product_flops_per_second: float
    """Two FLOPs a multiplication and addition, dense, normally distributed values."""
    copy_bytes_per_second: float
    """Bytes read and bytes written, both counted."""


def measure_roofline(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Time both on one device, which should have nothing else to do."""
    size, copied = _SIZES[device.type]
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty(size, size, device=device, dtype=dtype)
    seconds = _seconds(device, partial(torch.matmul, left, right, out=product))
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Roofline(
        size, 2 * size**3 / seconds, 2 * copied / _seconds(device, lambda: target.copy_(source))
    )


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Median seconds of one piece of work."""
    queued = _QUEUED[device.type]

    def several() -> None:
        for _ in range(queued):
            work()

    return median_seconds(device, several, warm_up=WARM_UP, rounds=ROUNDS) / queued


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as the one rank of a launch."""
    parser = argparse.ArgumentParser(prog="python -m sgt_ds.training.roofline")
    parser.add_argument("file", type=Path)
    parser.add_argument("dtype", choices=["bf16", "fp32"])
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    options = parser.parse_args(arguments)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype]
    # Here, because the bench of a step measures without DeepSpeed.
    from sgt_ds.training.engine import join_ranks, leave_ranks

    ranks = join_ranks(TIMEOUT_SECONDS)
    try:
        found = measure_roofline(ranks.device, dtype)
        write_text_atomically(options.file, json.dumps(asdict(found)))
    finally:
        leave_ranks()


if __name__ == "__main__":
    main()
