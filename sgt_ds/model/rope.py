"""Rotary position embedding, Hugging Face's half-split layout. Knows no layer and no loop."""

from __future__ import annotations

import torch
from torch import Tensor


class RotaryTables:
    """Cosines and sines by position, float32 (positions, head_size / 2), grown as inputs need.

    Plain tensors, neither parameters nor buffers: an engine that casts its module to bfloat16 must
    not cast angles. Made on the CPU, so that every device has the same bits, and moved once.
    """

    def __init__(self, head_size: int, theta: float) -> None:
        self.head_size, self.theta = head_size, theta
        self._cos, self._sin = rotary_tables(head_size, theta, 0)

    def at(self, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tables of the first `positions` positions on `device`."""
        if len(self._cos) < positions:
            self._cos, self._sin = rotary_tables(self.head_size, self.theta, positions)
        if self._cos.device != device:
            self._cos, self._sin = self._cos.to(device), self._sin.to(device)
        return self._cos[:positions], self._sin[:positions]


def rotary_tables(head_size: int, theta: float, positions: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position × θ^(−2i / head_size), each float32 (positions, head_size / 2).

    Frequencies and angles are rounded to float32 one after the other, as `transformers` does.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).to(torch.float32) / head_size
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * (1.0 / theta**exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + half]) of the last axis by its position's angle.

    `x`: floating (…, positions, heads, head_size); tables (positions, head_size / 2), or (sequences,
    positions, head_size / 2) where positions differ by sequence. Computed in at least
    float32, returned in the dtype of `x`.
    """
    cos, sin = cos[..., None, :], sin[..., None, :]
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
