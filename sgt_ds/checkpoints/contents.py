"""What of a DeepSpeed engine a checkpoint holds: shapes and sizes. Reads no value, knows no file."""

from __future__ import annotations

from typing import Any


def parameter_shapes(engine: Any) -> dict[str, list[int]]:
    """Name and shape of every parameter of the engine's module."""
    return {name: list(tensor.shape) for name, tensor in engine.module.named_parameters()}


def saved_sizes(engine: Any) -> list[int]:
    """Bytes of each tensor of this rank that a checkpoint will hold, moments included.

    `engine`: DeepSpeed's, with AdamW and ZeRO 0 to 2, before its first update or after.
    """
    if not (engine.save_zero_checkpoint or engine.save_non_zero_checkpoint):
        return []
    groups = engine.optimizer.param_groups  # under ZeRO the flat float32 weights of this rank
    masters = [tensor for group in groups for tensor in group["params"]]
    tensors = masters * (3 if engine.save_zero_checkpoint else 2)
    if engine.save_non_zero_checkpoint:
        weights = engine.module.state_dict().values()
        tensors += {tensor.untyped_storage()._cdata: tensor for tensor in weights}.values()
    return [tensor.untyped_storage().nbytes() for tensor in tensors]
