"""What the pickle inside a tensor file references, found without running it. No DeepSpeed."""

from __future__ import annotations

from pathlib import Path

import torch

PAYLOAD_SUFFIX = ".pt"

# The only classes beside torch's own that a ZeRO-2 checkpoint of DeepSpeed 0.19 names.
ALLOWED_NAMES = frozenset(
    {
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    }
)


def payload_fault(path: Path) -> str | None:
    """What a pickle in `path` asks for beyond tensors and known plain types, without running it."""
    try:
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception as error:  # a hostile file may raise anything; each is a refusal
        return f"is not a tensor file ({' '.join(str(error).split()) or type(error).__name__})"
    if foreign := set(asked) - ALLOWED_NAMES:
        return f"references {', '.join(sorted(foreign))}: more than tensors, so it is not loaded"
    return None
