"""One verdict for all ranks: outcomes gathered over the host-side group. Knows no checkpoint.

A rank that failed says so instead of raising where the others wait; then all raise the same error.
"""

from __future__ import annotations

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


def from_first(value: T, group: Any) -> T:
    """Rank 0's value, on every rank."""
    if group is None:
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return box[0]  # type: ignore[no-any-return]


def agree_on_save(fault: str | None, what: str, group: Any) -> None:
    """Go on if no rank has a fault. Raises: SaveFailed on all ranks, naming those that have."""
    faults = [
        f"rank {rank}: {said}" for rank, said in enumerate(gather(fault, group)) if said is not None
    ]
    if faults:
        raise SaveFailed(f"{what} was not saved ({'; '.join(faults)}); the previous one is kept")


def agree_on_input(error: UserError | None, group: Any) -> None:
    """Go on if no rank met bad input. Raises: the first rank's UserError, on all ranks."""
    parts = None if error is None else (error.file, error.field, error.message)
    for said in gather(parts, group):
        if said is not None:
            raise UserError(*said, everywhere=True)
