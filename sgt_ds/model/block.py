"""One transformer block and its loops, as a pure function of tensors. Knows no layer number.

Everything that varies from step to step is an argument: `torch.compile` makes one graph for each
kind of block, and every layer, choice of heads and value of a factor reuses it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from sgt_ds.growth import is_narrow
from sgt_ds.model.attention import attention
from sgt_ds.model.documents import Documents
from sgt_ds.model.entropy import entropy_sums, last_row_entropy
from sgt_ds.model.linear import linear
from sgt_ds.model.loops import LoopInputs
from sgt_ds.model.narrow import narrow_loop
from sgt_ds.model.norm import rms_norm


class BlockWeights(NamedTuple):
    """Weights of one block; d is the width, f the intermediate size."""

    attention_norm: Tensor
    """(d,)"""
    qkv: Tensor
    """(3, heads, head_size, d): rows of W_q, W_k, W_v by head."""
    output: Tensor
    """(d, heads, head_size): columns of W_o by head."""
    mlp_norm: Tensor
    """(d,)"""
    gate_up: Tensor
    """(2f, d), rows of the gate first."""
    down: Tensor
    """(d, f)"""


def block(
    x: Tensor,
    weights: BlockWeights,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    loop: LoopInputs | None,
    measure: bool,
    documents: Documents | None = None,
    fp8: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Apply one block: attention, its loops, the feed-forward network.

    `x`: floating (sequences, positions, d). `documents`: keeps attention, in the main pass and in
    every loop, within each document; the tables are then by sequence too. `fp8`: products with
    weights in float8, but for passes in the heads' own space. Returns the new `x` and, with
    `measure`, the entropy sums of the main pass, float64 (heads, 3) as in `entropy_sums`.
    Paper, eq. 5 to 7: H(0) = H + Attn(H), H(k) = H(k−1) + Σ over the looping heads of
    Attn_i(H(k−1)), then the FFN; a loop of scope `block` re-applies attention and FFN together.
    """
    norm, qkv, output = weights.attention_norm, weights.qkv, weights.output
    added, query, key = attention(x, norm, qkv, output, cos, sin, eps, documents, fp8)
    x = x + added
    sums = _entropy_sums(query, key, documents) if measure else None
    if loop is not None and loop.scope == "attention":
        x = _attention_loop(x, weights, cos, sin, eps, loop, documents, fp8)
    x = x + _feed_forward(x, weights, eps, fp8)
    if loop is not None and loop.scope == "block":
        for _ in range(loop.depth):
            x = x + attention(x, norm, qkv, output, cos, sin, eps, documents, fp8)[0]
            x = x + _feed_forward(x, weights, eps, fp8)
    return x, sums


def _entropy_sums(query: Tensor, key: Tensor, documents: Documents | None) -> Tensor:
    if documents is None:
        return entropy_sums(last_row_entropy(query, key), query.shape[2])
    lengths = documents.last_lengths
    return entropy_sums(last_row_entropy(query, key, lengths), lengths[:, None])


def _attention_loop(
    x: Tensor,
    weights: BlockWeights,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    loop: LoopInputs,
    documents: Documents | None,
    fp8: bool,
) -> Tensor:
    qkv, output = weights.qkv, weights.output
    if loop.heads is not None:
        # Once for all passes: forward copies a few rows, backward scatters one sum of gradients.
        qkv, output = qkv.index_select(1, loop.heads), output.index_select(1, loop.heads)
    norm, scale = weights.attention_norm, loop.scale
    heads, of_all = output.shape[1], weights.output.shape[1]
    if is_narrow(loop.depth, heads, of_all, scaled=scale is not None):
        return narrow_loop(x, norm, qkv, output, cos, sin, eps, loop.depth, scale, documents)
    for index in range(loop.depth):
        used = output
        if scale is not None:
            # A head's factor on its columns of W_o equals one on its output, and is far smaller.
            used = (output * scale[index][:, None]).to(output.dtype)
        x = x + attention(x, norm, qkv, used, cos, sin, eps, documents, fp8)[0]
    return x


def _feed_forward(x: Tensor, weights: BlockWeights, eps: float, fp8: bool) -> Tensor:
    normed = rms_norm(x, weights.mlp_norm, eps)
    gate_rows, up_rows = weights.gate_up.to(x.dtype).chunk(2)
    # Two products: after one, backward would have to lay both gradients side by side again.
    gate, up = linear(normed, gate_rows, fp8), linear(normed, up_rows, fp8)
    return linear(F.silu(gate) * up, weights.down.to(x.dtype), fp8)
