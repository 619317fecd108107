"""Check that all ranks hold the same weights: under ZeRO-1 and -2 they must, bit for bit.

A checksum a parameter, made on the device; the ranks compare them on the host.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sgt_ds.errors import StateMismatch
from sgt_ds.growth import odd_ranks
from sgt_ds.training.engine import Ranks

# Elements of one row: rows are summed, and weighed by their place.
_ROW = 4096
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(model: nn.Module) -> Tensor:
    """One checksum a parameter, in the model's order: int64 (parameters,), on the device.

    Σ over rows of (an odd number of its own × sum of the row's bits read as integers), modulo 2^64.
    Any one changed element changes it (an odd factor keeps every bit), and so does moving values to
    another row; it depends on no order of summing. Two changes within one row can cancel.
    """
    return torch.stack([_checksum(parameter.detach()) for parameter in model.parameters()])


def _checksum(values: Tensor) -> Tensor:
    bits = values.reshape(-1).view(_INTEGERS[values.element_size()])
    whole = bits.numel() // _ROW * _ROW
    rows = bits[:whole].view(-1, _ROW).sum(dim=1, dtype=torch.int64)
    factors = torch.arange(1, 2 * len(rows) + 1, 2, dtype=torch.int64, device=bits.device)
    return (rows * factors).sum() - bits[whole:].sum(dtype=torch.int64)


def compare_ranks(model: nn.Module, step: int, ranks: Ranks) -> None:
    """Check that every rank has applied `step` updates and holds the same parameters. Collective.

    Raises: StateMismatch on all ranks, naming those that differ from most (from rank 0 where
    there is no majority), and the first parameter that differs.
    """
    own = torch.cat([torch.tensor([step]), checksums(model).cpu()])
    gathered = [torch.empty_like(own) for _ in range(ranks.world_size)]
    dist.all_gather(gathered, own, group=ranks.host_group)
    seen = [tuple(each.tolist()) for each in gathered]
    odd, reference = odd_ranks(seen)
    if odd:
        raise StateMismatch(_described(odd, seen, reference, model, step))


def _described(
    odd: list[int],
    seen: list[tuple[Any, ...]],
    reference: tuple[Any, ...],
    model: nn.Module,
    step: int,
) -> str:
    names = ["the step itself", *(name for name, _ in model.named_parameters())]
    mine = seen[odd[0]]
    first = next(name for name, a, b in zip(names, mine, reference, strict=True) if a != b)
    several = len(odd) > 1
    unsure = " (no majority shows which side is right)" if 2 * len(odd) >= len(seen) else ""
    return (
        f"step {step}: rank{'s' if several else ''} {', '.join(map(str, odd))} of {len(seen)} "
        f"hold{'' if several else 's'} different weights from the others{unsure}, first in "
        f"{first}; "
        "resume from the last checkpoint, and check that host's memory and links"
    )
