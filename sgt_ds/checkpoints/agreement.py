"""One verdict for all ranks: outcomes gathered over the host-side group. Knows no checkpoint.

A rank that failed says so instead of raising where the others wait; then all raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from sgt_ds.errors import SgtError, UserError

T = TypeVar("T")


class SaveFailed(SgtError):
    """A checkpoint could not be written; what was there before is untouched. Names the ranks."""

    everywhere = True


def rank_and_size(group: Any) -> tuple[int, int]:
    """Rank of this process and the number of ranks; (0, 1) without a group."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def gather(value: T, group: Any) -> list[T]:
    """Every rank's value, in rank order, on every rank."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_first(action: Callable[[], T], group: Any) -> T:
    """What `action` gives on rank 0, on every rank. Collective.

    Raises: rank 0's UserError, on all ranks.
    """
    box: list[Any] = [None, None]
    if rank_and_size(group)[0] == 0:
        try:
            box[0] = action()
        except UserError as error:
            box[1] = error
    if group is not None:
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    answer, fault = box
    if fault is not None:
        raise fault.on_all_ranks()
    return answer  # type: ignore[no-any-return]


def agree_on_save(fault: str | None, what: str, group: Any) -> None:
    """Go on if no rank has a fault. Raises: SaveFailed on all ranks, naming those that have."""
    faults = [
        f"rank {rank}: {said}" for rank, said in enumerate(gather(fault, group)) if said is not None
    ]
    if faults:
        raise SaveFailed(f"{what} was not saved ({'; '.join(faults)}); the previous one is kept")


def agree_on_input(error: UserError | None, group: Any) -> None:
    """Go on if no rank met bad input. Raises: the first rank's UserError, on all ranks."""
    for said in gather(error, group):
        if said is not None:
            raise said.on_all_ranks()
