"""The attention sub-layer over all heads or a gathered few. Knows no depth, layer or schedule."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from sgt_ds.model.documents import Documents, document_attention
from sgt_ds.model.linear import linear
from sgt_ds.model.norm import rms_norm
from sgt_ds.model.rope import rotate


def attention(
    x: Tensor,
    norm: Tensor,
    qkv: Tensor,
    output: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    documents: Documents | None,
    fp8: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pre-norm, RoPE, causal attention and output projection of the heads whose weights are given.

    `x`: floating (sequences, positions, d); `norm`: (d,); `qkv`: (3, heads, head_size, d);
    `output`: (d, heads, head_size); tables as in `rotate`. Weights are cast to the dtype of `x`.
    `documents`: keeps each position's attention within its own document; None is one document.
    `fp8`: both products in float8, as in `linear`.
    Returns what the sub-layer adds to the residual stream, shape of `x`, and its rotated queries
    and keys, each (sequences, heads, positions, head_size). Paper, eq. 1 and 2.
    """
    width = x.shape[-1]
    _, heads, head_size, _ = qkv.shape
    normed = rms_norm(x, norm, eps)
    # One product for queries, keys and values of all the heads that are computed.
    projected = linear(normed, qkv.to(x.dtype).view(3 * heads * head_size, width), fp8)
    mixed, query, key = mix(projected, heads, cos, sin, documents)
    added = linear(mixed, output.to(x.dtype).view(width, heads * head_size), fp8)
    return added, query, key


def mix(
    projected: Tensor, heads: int, cos: Tensor, sin: Tensor, documents: Documents | None
) -> tuple[Tensor, Tensor, Tensor]:
    """RoPE and causal attention of projected heads.

    `projected`: floating (sequences, positions, 3 × heads × head_size), queries first. Returns what
    the heads take in, (sequences, positions, heads × head_size), and rotated queries and keys as
    `attention` does.
    """
    sequences, positions, width = projected.shape
    split = projected.view(sequences, positions, 3, heads, width // (3 * heads))
    query, key, value = split.unbind(2)
    # Turned while a position's heads lie side by side, as the product gives them: so do attention's
    # result and gradients then, and neither is copied into another order.
    query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    if documents is None:
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    else:
        mixed = document_attention(query, key, value, documents)
    return mixed.transpose(1, 2).reshape(sequences, positions, width // 3), query, key
