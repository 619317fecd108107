"""Next-token loss from the last hidden states. Knows no block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sgt_ds.model.norm import rms_norm


def logits_of(x: Tensor, norm: Tensor, head: Tensor, eps: float) -> Tensor:
    """Final norm and output matrix: floating (sequences, positions, rows of `head`), dtype of `x`."""
    return F.linear(rms_norm(x, norm, eps), head.to(x.dtype))


def next_token_loss(x: Tensor, norm: Tensor, head: Tensor, targets: Tensor, eps: float) -> Tensor:
    """Mean cross-entropy in nats over all positions, in at least float32, a scalar.

    `x`: floating (sequences, positions, d); `head`: (padded vocabulary, d); `targets`: int64
    (sequences, positions). Padding rows of the vocabulary take part in the softmax.
    """
    logits = logits_of(x, norm, head, eps).flatten(0, 1)
    precise = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(precise), targets.flatten())
