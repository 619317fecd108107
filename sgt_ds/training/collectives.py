"""How long collectives between the ranks of a launch take, at several sizes.

`deepspeed --module sgt_ds.training.collectives FILE BYTES`; rank 0 writes FILE. Knows no model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from sgt_ds.files import write_text_atomically
from sgt_ds.training.engine import Ranks, join_ranks, leave_ranks
from sgt_ds.training.timing import median_seconds

# Too small for a link's bandwidth to matter.
SMALL_BYTES = 4096
WARM_UP, ROUNDS = 3, 10
TIMEOUT_SECONDS = 120.0


def time_collectives(ranks: Ranks, size: int) -> dict[str, dict[str, float]]:
    """Median seconds of each operation on the slowest rank: `small`, and `large` of `size` bytes.

    Bytes are those of the whole tensor, reduced or gathered, in bfloat16. Collective.
    """
    found: dict[str, dict[str, float]] = {"all_reduce": {}, "all_gather": {}}
    for name, wanted in (("small", SMALL_BYTES), ("large", size)):
        share = max(1, wanted // 2 // ranks.world_size)
        whole = torch.zeros(share * ranks.world_size, dtype=torch.bfloat16, device=ranks.device)
        own = torch.zeros(share, dtype=torch.bfloat16, device=ranks.device)
        found["all_reduce"][name] = _seconds(ranks, partial(dist.all_reduce, whole))
        found["all_gather"][name] = _seconds(
            ranks, partial(dist.all_gather_into_tensor, whole, own)
        )
    return found


def _seconds(ranks: Ranks, collective: Callable[[], object]) -> float:
    own = median_seconds(
        ranks.device,
        collective,
        warm_up=WARM_UP,
        rounds=ROUNDS,
        before=partial(dist.barrier, group=ranks.host_group),
    )
    slowest = torch.tensor([own], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=ranks.host_group)
    return float(slowest)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as this rank."""
    parser = argparse.ArgumentParser(prog="python -m sgt_ds.training.collectives")
    parser.add_argument("file", type=Path)
    parser.add_argument("bytes", type=int)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    options = parser.parse_args(arguments)
    ranks = join_ranks(TIMEOUT_SECONDS)
    try:
        found = time_collectives(ranks, options.bytes)
        if ranks.is_main:
            write_text_atomically(options.file, json.dumps(found))
    finally:
        leave_ranks()


if __name__ == "__main__":
    main()
