"""Passes of the looping layers as a model takes them: shapes are plain values, the rest tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from sgt_ds.growth import Passes, Scope


class LoopInputs(NamedTuple):
    """How one layer loops in one forward pass.

    A compiled block is one graph for each `Passes.kind`: which heads and which factors are tensors,
    so that neither recompiles anything.
    """

    depth: int
    """Passes after the main one."""
    scope: Scope
    """What is re-applied: the attention sub-layer or the whole block."""
    heads: Tensor | None
    """int64 (computed heads,), ascending; None computes all."""
    scale: Tensor | None
    """float32 (depth, computed heads), in [0, 1]; None applies no factor."""


def loop_inputs(passes: Mapping[int, Passes], device: torch.device) -> dict[int, LoopInputs]:
    """Tensors for `Transformer.forward` from the passes of each looping layer."""
    return {
        layer: LoopInputs(
            run.depth,
            run.scope,
            None if run.heads is None else _on_device(torch.tensor(run.heads), device),
            None if run.scale is None else _on_device(torch.tensor(run.scale), device),
        )
        for layer, run in passes.items()
    }


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return tensor.to(device)
    # From pageable memory the copy would wait for everything that is queued on the card.
    return tensor.pin_memory().to(device, non_blocking=True)
