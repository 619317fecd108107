"""Root-mean-square norm in at least float32. Knows no other part of the model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` over the root of its mean square along the last axis, times `weight`.

    `x`: floating (…, d); `weight`: (d,). Computed in float32, or float64 where `x` is; returned in
    the dtype of `x`. Zhang & Sennrich 2019, as in LLaMA.
    """
    precise = torch.promote_types(x.dtype, torch.float32)
    normed = F.rms_norm(x.to(precise), (x.shape[-1],), weight.to(precise), eps)
    return normed.to(x.dtype)
