"""Master weights of a DeepSpeed checkpoint, read without DeepSpeed's engine, a GPU or other ranks.

ZeRO-1 and ZeRO-2 keep the float32 master weights as one flat vector a parameter group, cut into one
partition a rank; ZeRO-0 keeps the weights themselves. Files are memory-mapped: what is read is what
is asked for. Layout facts: deepspeed 0.19, `runtime/zero/stage_1_and_2.py`,
`utils/zero_to_fp32.py`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sgt_ds.checkpoints import load_payload
from sgt_ds.errors import UserError
from sgt_ds.inference.weights import in_pieces

MODEL_FILE = "mp_rank_00_model_states.pt"
_PARTITION_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_FOREIGN_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_\d+_mp_rank_\d+_\w+\.pt|mp_rank_\d+_\w+\.pt")


@dataclass(frozen=True)
class _Place:
    group: int
    offset: int
    shape: tuple[int, ...]


class MasterWeights:
    """Every parameter of a checkpoint, in float32, by the training model's names.

    Raises: UserError where a file is missing or damaged, or the layout is none that is known.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self._groups: list[list[Tensor]] = []
        self._places: dict[str, _Place] = {}
        self._padding: list[tuple[int, int, int]] = []
        model = self._load(checkpoint / MODEL_FILE)
        partitions = self._partition_files()
        if partitions:
            self._take_partitions(model, partitions)
        else:
            self._take_module(model)
        self.world_size = max(len(partitions), 1)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter."""
        return {name: place.shape for name, place in self._places.items()}

    def read(self, name: str, start: int, count: int) -> Tensor:
        """`count` elements of a parameter from its flat index `start`: float32 (count,).

        A view of the mapped file where they are in one partition, a copy otherwise.
        """
        place = self._places[name]
        return self._span(place.group, place.offset + start, count)

    def bit_sum(self) -> int:
        """Sum of all partitions' elements as 32-bit integers, modulo 2^64, padding left out.

        Taken from the partitions as they lie, so that it tells whether elements that were read by
        name are all of them, each once.
        """
        whole = sum(bit_sum(part) for parts in self._groups for part in parts)
        padding = sum(bit_sum(self._span(*span)) for span in self._padding)
        return (whole - padding) % (1 << 64)

    def _span(self, group: int, start: int, count: int) -> Tensor:
        pieces, position = [], 0
        for part in self._groups[group]:
            low, high = max(start - position, 0), min(start + count - position, part.numel())
            if low < high:
                pieces.append(part[low:high])
            position += part.numel()
        if not pieces:
            return torch.empty(0)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _partition_files(self) -> list[Path]:
        found: dict[int, Path] = {}
        for path in self.checkpoint.iterdir():
            if match := _PARTITION_FILE.fullmatch(path.name):
                found[int(match[1])] = path
            elif path.name != MODEL_FILE and _FOREIGN_FILE.fullmatch(path.name):
                raise UserError(
                    path, None, "uses ZeRO-3 or tensor parallelism; only ZeRO 0 to 2 can be read"
                )
        return [found[rank] for rank in sorted(found)]

    def _take_partitions(self, model: Any, files: list[Path]) -> None:
        shapes = model.get("param_shapes")
        if not isinstance(shapes, list):
            raise UserError(
                self.checkpoint / MODEL_FILE, "param_shapes", "is missing; not a ZeRO file"
            )
        for path in files:
            saved: Any = self._load(path).get("optimizer_state_dict")
            count = saved.get("partition_count") if isinstance(saved, dict) else None
            if count is None:
                raise UserError(path, "partition_count", "is missing; not a ZeRO 1 or 2 file")
            ranks = max(count) if isinstance(count, list) else count
            if ranks != len(files):
                raise UserError(
                    self.checkpoint,
                    None,
                    f"holds {len(files)} of {ranks} ranks' partitions; copy the missing files",
                )
            parts = saved["single_partition_of_fp32_groups"]
            if len(parts) != len(shapes) or any(part.dtype != torch.float32 for part in parts):
                raise UserError(path, "single_partition_of_fp32_groups", "is not as ZeRO writes it")
            self._groups = self._groups or [[] for _ in parts]
            for group, part in zip(self._groups, parts, strict=True):
                group.append(part.flatten())
            paddings = saved.get("param_alignment_paddings") or [[0] * len(each) for each in shapes]
        for index, (group_shapes, gaps) in enumerate(zip(shapes, paddings, strict=True)):
            self._place_group(index, group_shapes, gaps)

    def _place_group(self, index: int, shapes: Any, gaps: list[int]) -> None:
        offset = 0
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            self._places[name] = _Place(index, offset, tuple(shape))
            offset += math.prod(shape)
            self._padding.append((index, offset, gap))
            offset += gap
        available = sum(part.numel() for part in self._groups[index])
        # Alignment after the last parameter may be stripped; nothing else may be missing.
        if available < offset - (gaps[-1] if gaps else 0):
            raise UserError(
                self.checkpoint,
                None,
                f"partitions hold {available} elements of a group of {offset}; copy it again",
            )
        self._padding.append((index, offset, max(available - offset, 0)))

    def _take_module(self, model: Any) -> None:
        module = model.get("module")
        if not isinstance(module, dict) or model.get("param_shapes") is not None:
            raise UserError(
                self.checkpoint, None, "*_optim_states.pt files are missing; copy them too"
            )
        for name, tensor in module.items():
            if tensor.dtype != torch.float32:
                raise UserError(
                    self.checkpoint / MODEL_FILE,
                    name,
                    f"is {tensor.dtype} without a float32 master; train with ZeRO 1 or 2",
                )
            self._places[name] = _Place(len(self._groups), 0, tuple(tensor.shape))
            self._groups.append([tensor.flatten()])

    def _load(self, path: Path) -> dict[str, Any]:
        values = load_payload(path, mmap=True)
        if not isinstance(values, dict):
            raise UserError(path, None, "is not a DeepSpeed file; use another checkpoint")
        return values


def bit_sum(values: Tensor) -> int:
    """Sum of float32 `values` read as 32-bit integers: exact, in any order."""
    return sum(int(piece.view(torch.int32).sum(dtype=torch.int64)) for piece in in_pieces(values))
