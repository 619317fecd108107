"""Weights out: safetensors shards written one tensor at a time, and read back. No growth."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sgt_ds.errors import UserError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_SAFETENSORS_NAMES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}

# Elements looked at once: sums and comparisons make copies of what they look at.
PIECE = 1 << 20

INDEX_NAME = "model.safetensors.index.json"

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class Shard:
    """One file and the tensors in it, in order."""

    file: str
    shapes: Mapping[str, tuple[int, ...]]


def parse_size(text: str) -> int:
    """Bytes of a size such as `5GB`, `500MB` or `1GiB`. Raises: UserError."""
    for unit, factor in _UNITS.items():
        number = text.upper().removesuffix(unit)
        if number != text.upper() and number.strip().replace(".", "", 1).isdigit():
            size = int(float(number) * factor)
            if size > 0:
                return size
    raise UserError("--max-shard-size", None, f"'{text}' is not a size; write 5GB, 500MB or 1GiB")


def plan_shards(shapes: Mapping[str, tuple[int, ...]], dtype: str, limit: int) -> list[Shard]:
    """Cut tensors into files of at most `limit` bytes; a larger tensor has a file of its own."""
    width, groups, used = DTYPES[dtype].itemsize, [{}], 0  # type: ignore[var-annotated]
    for name, shape in shapes.items():
        size = math.prod(shape) * width
        if groups[-1] and used + size > limit:
            groups.append({})
            used = 0
        groups[-1][name] = shape
        used += size
    if len(groups) == 1:
        return [Shard("model.safetensors", groups[0])]
    return [
        Shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, 1)
    ]


def write_shard(folder: Path, shard: Shard, dtype: str, read: Read) -> int:
    """Write one file, holding one tensor at a time. Returns the bytes of its tensors.

    `read` gives a tensor by name, of any floating dtype and the planned shape.
    Raises: UserError where a value does not fit `dtype`; OSError.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shard.shapes.items():
        start, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with (folder / shard.file).open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in shard.shapes:
            tensor = cast(read(name), dtype, name).contiguous()
            # `tofile` would tell two numbers in place of what the system says of a full disk.
            stream.write(tensor.flatten().view(torch.uint8).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())
    return end


def write_index(folder: Path, shards: list[Shard], dtype: str) -> None:
    """Write the table of tensors and files that several shards need."""
    if len(shards) == 1:
        return
    numbers = sum(math.prod(shape) for shard in shards for shape in shard.shapes.values())
    index = {
        "metadata": {"total_size": numbers * DTYPES[dtype].itemsize, "total_parameters": numbers},
        "weight_map": {name: shard.file for shard in shards for name in shard.shapes},
    }
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def read_back(folder: Path, shard: Shard) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a written file, read from the disk by the `safetensors` library.

    Raises: UserError where the file does not hold exactly the planned tensors.
    """
    path = folder / shard.file
    try:
        with safe_open(path, framework="pt") as stream:
            if set(stream.keys()) != set(shard.shapes):
                raise UserError(path, None, "does not hold the planned tensors; convert again")
            for name in shard.shapes:
                yield name, stream.get_tensor(name)
    except SafetensorError as error:
        raise UserError(path, None, f"cannot be read back ({error}); convert again") from None


def in_pieces(values: Tensor) -> Iterator[Tensor]:
    """Views of `values`, flat, of at most `PIECE` elements, in order."""
    flat = values.flatten()
    for start in range(0, flat.numel(), PIECE):
        yield flat[start : start + PIECE]


def cast(tensor: Tensor, dtype: str, name: str) -> Tensor:
    """`tensor` in the export's dtype. Raises: UserError where it is not finite there."""
    converted = tensor.to(DTYPES[dtype])
    if not all(bool(torch.isfinite(piece).all()) for piece in in_pieces(converted)):
        whole = bool(torch.isfinite(tensor).all())
        message = (
            "does not fit fp16; use --dtype bf16" if whole else "is not finite; use an older one"
        )
        raise UserError("weights", name, message)
    return converted
