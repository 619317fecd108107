"""Imported weights for a model about to be trained. Knows no engine."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from sgt_ds.checkpoints import Start, read_start
from sgt_ds.config import ModelConfig, check_start
from sgt_ds.errors import UserError
from sgt_ds.model import from_llama_names

# How weights are drawn says nothing about weights that are there.
_NO_SHAPE = {"init_std"}


def checked_start(path: Path, model: ModelConfig) -> Start:
    """The verified start in `path`.

    Raises: UserError where it is none, damaged or of another shape.
    """
    check_start(path)
    start = read_start(path)
    theirs, ours = start.model.model_dump(exclude=_NO_SHAPE), model.model_dump(exclude=_NO_SHAPE)
    for key, value in theirs.items():
        if ours[key] != value:
            raise UserError(
                path,
                f"model.{key}",
                f"is {value} in the import but {ours[key]} in this run; use the `model` of "
                f"{path / 'model.yaml'}",
            )
    return start


def start_weights(start: Start, model: ModelConfig) -> dict[str, Tensor]:
    """The weights of `start`, by the names of a model of that shape. Raises: UserError."""
    tensors: dict[str, Tensor] = {}
    for file in start.weights:
        with safe_open(file, framework="pt") as stream:
            tensors |= {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    try:
        return from_llama_names(tensors, model)
    except KeyError as error:
        raise UserError(start.path, None, f"lacks {error.args[0]}; import it again") from None
