"""Several passes of a few heads, computed in these heads' space. Knows no layer, no schedule."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sgt_ds.model.attention import mix
from sgt_ds.model.documents import Documents


def narrow_loop(
    x: Tensor,
    norm: Tensor,
    qkv: Tensor,
    output: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    depth: int,
    scale: Tensor | None,
    documents: Documents | None,
) -> Tensor:
    """`depth` passes H(k) = H(k−1) + Σ Attn_i(H(k−1)) of the heads whose weights are given.

    Arguments and weights as in `attention.attention`; `scale`: (depth, heads), what each pass
    multiplies each head's output by, or None. Returns H(depth), shape and dtype of `x` = H(0).

    With P the heads' rows of W_q, W_k, W_v times the norm's weight, O their columns of W_o and
    m(k) what their attention gives in pass k, H(k) = H(k−1) + O·m(k). All that the next pass reads
    of H(k) is its product with P and its square, and both follow from m(k) alone:
    P·H(k) = P·H(k−1) + (P·O)·m(k), |H(k)|² = |H(k−1)|² + m(k)·(2·Oᵀ·H(k−1) + (Oᵀ·O)·m(k)).
    So the residual stream, many times wider than the heads, is read once and written once for all
    passes. The square and what the heads give add up in at least float32. As exact as pass by pass
    where a pass changes the stream by a small part of it; the more of it a pass takes away, the
    more of the rounding of what was there stays: of one half 1.5 times the error, of nine tenths 8
    times.
    Paper, eq. 5 to 7: H(k).
    """
    width, precise = x.shape[-1], torch.promote_types(x.dtype, torch.float32)
    _, heads, head_size, _ = qkv.shape
    computed = heads * head_size
    columns = output.to(x.dtype).view(width, computed)
    rows = (qkv * norm).to(x.dtype).view(3 * computed, width)
    # P·H(k), unnormed queries, keys and values, and Oᵀ·H(k): one product for both at first.
    read = F.linear(x, torch.cat((rows, columns.t())))
    projected, columns_of_stream = read.split_with_sizes((3 * computed, computed), -1)
    # What both see of the heads' outputs: P·O, (3 × computed, computed), and Oᵀ·O, square. Apart
    # from here on: as one product, backward would lay both gradients side by side in each pass.
    if depth > 1:
        rows_of_heads = F.linear(rows, columns.t())
        columns_of_heads = F.linear(columns.t(), columns.t())
    floor = torch.finfo(x.dtype).eps / 8
    # Of the norm, and not of the float32 copy, backward keeps no more than `x`.
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=precise).square()
    total = None
    for index in range(depth):
        normed = projected.to(precise) * torch.rsqrt(square / width + eps)
        mixed = mix(normed.to(x.dtype), heads, cos, sin, documents)[0]
        if scale is not None:
            mixed = mixed * scale[index].to(x.dtype).repeat_interleave(head_size)
        total = mixed.to(precise) if total is None else total + mixed
        if index + 1 == depth:
            break
        columns_of_change = F.linear(mixed, columns_of_heads)
        both = 2 * columns_of_stream.to(precise) + columns_of_change.to(precise)
        changed = square + (mixed * both).sum(-1, keepdim=True)
        # Where heads take nearly all of the stream away, what is left is less than its rounding.
        square = torch.maximum(changed, floor * square)
        projected = projected + F.linear(mixed, rows_of_heads)
        columns_of_stream = columns_of_stream + columns_of_change
    assert total is not None
    return x + F.linear(total.to(x.dtype), columns)
