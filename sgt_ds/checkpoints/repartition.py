"""Serves optimizer state saved by one number of ranks to another number while loading.

ZeRO-1 and -2 lay each parameter group out flat and cut it into equal partitions, one a rank, padded
at the end. Another number of ranks means other cuts of the same numbers: each new rank reads the
old partitions that its own overlaps. No number changes and nothing is written, which is why this
stands in for DeepSpeed's universal format, whose conversion also unpickles what it reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sgt_ds.checkpoints.payload import SafePayload, load_payload
from sgt_ds.errors import UserError

_PARTITION = re.compile(r"((?:bf16_)?zero_pp_rank_)([0-9]+)(_mp_rank_00_optim_states\.pt)")


class RepartitionedPayload(SafePayload):
    """Answers DeepSpeed as if `world_size` ranks had saved what `saved_world_size` ranks did.

    `partition_sizes`: elements of this engine's partition of each parameter group, padding
    included.
    """

    def __init__(
        self, saved_world_size: int, world_size: int, partition_sizes: Sequence[int]
    ) -> None:
        super().__init__()
        self._saved, self._world_size = saved_world_size, world_size
        self._sizes = list(partition_sizes)

    def read(self, path: str, map_location: Any) -> Any:
        """Read one file, or make the one that DeepSpeed asks for. Raises: UserError."""
        target = Path(path)
        match = _PARTITION.fullmatch(target.name)
        if match is None:
            content = super().read(path, map_location)
            if isinstance(content, dict):
                content["dp_world_size"] = self._world_size
            return content
        files = [target.with_name(f"{match[1]}{rank}{match[3]}") for rank in range(self._saved)]
        try:
            return repartition(files, int(match[2]), self._world_size, self._sizes)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise UserError(
                target.parent,
                files[0].name,
                f"cannot be repartitioned for {self._world_size} ranks ({type(error).__name__}: "
                f"{error}); "
                f"resume with {self._saved} ranks",
            ) from None


def repartition(
    files: Sequence[Path],
    rank: int,
    world_size: int,
    sizes: Sequence[int],
    load: Callable[[Path], Any] = load_payload,
) -> dict[str, Any]:
    """The partition file of `rank` among `world_size`, from the `files` of the ranks that saved.

    `sizes`: elements of the new partition of each group. Raises: UserError, and KeyError and its
    like where the files hold no ZeRO partitions.
    """
    first = load(files[0])
    zero = first["optimizer_state_dict"]
    groups = zero["base_optimizer_state"]["param_groups"]
    old_sizes = [
        partition.numel() + padding
        for partition, padding in zip(
            zero["single_partition_of_fp32_groups"], zero["group_paddings"], strict=True
        )
    ]
    if len(old_sizes) != len(sizes) or len(groups) != len(sizes):
        raise ValueError(f"{len(old_sizes)} parameter groups were saved, {len(sizes)} are needed")
    pieces: list[dict[str, list[torch.Tensor]]] = [{} for _ in sizes]
    for old_rank, file in enumerate(files):
        spans = [
            _overlap(old_rank * old, old, rank * new, new)
            for old, new in zip(old_sizes, sizes, strict=True)
        ]
        if any(stop > start for start, stop in spans):
            content = first if old_rank == 0 else load(file)
            for index, (start, stop) in enumerate(spans):
                for name, tensor in _flat_tensors(content["optimizer_state_dict"], index).items():
                    # Saved masters end before the padding: a slice past their end is empty.
                    pieces[index].setdefault(name, []).append(tensor[start:stop])
    paddings = []
    for index, (found, size, group) in enumerate(zip(pieces, sizes, groups, strict=True)):
        joined = {name: torch.cat(parts) for name, parts in found.items()}
        master = joined.pop("", torch.zeros(0))
        paddings.append(size - master.numel())
        zero["single_partition_of_fp32_groups"][index] = master
        state = zero["base_optimizer_state"]["state"].get(group["params"][0], {})
        for name, value in state.items():
            if torch.is_tensor(value) and value.dim():
                lean = joined.get(name, value.new_zeros(0))[: master.numel()]
                state[name] = torch.cat([lean, value.new_zeros(size - lean.numel())])
    zero["group_paddings"] = paddings
    zero["partition_count"] = [world_size] * len(sizes)
    return dict(first)


def _overlap(old_start: int, old_size: int, new_start: int, new_size: int) -> tuple[int, int]:
    """The span of the new partition inside the old one, in the old one's own elements."""
    start = max(old_start, new_start)
    stop = min(old_start + old_size, new_start + new_size)
    return start - old_start, max(stop, start) - old_start


def _flat_tensors(zero: dict[str, Any], index: int) -> dict[str, torch.Tensor]:
    """The group's master weights, under '', and the optimizer's flat tensors by name."""
    base = zero["base_optimizer_state"]
    state = base["state"].get(base["param_groups"][index]["params"][0], {})
    flat = {name: value for name, value in state.items() if torch.is_tensor(value) and value.dim()}
    return {"": zero["single_partition_of_fp32_groups"][index], **flat}
