"""Normalised entropy of the last query row's attention. Knows no layer; builds no N × N matrix.

Paper, eq. 4 (length-normalised entropy); only row N of the matrix is ever computed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def last_row_entropy(query: Tensor, key: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Entropy of the last position's attention over the keys, as a share of its largest value.

    `query`, `key`: floating (sequences, heads, positions, head_size), after RoPE.
    `lengths`: int64 (sequences,); the last position attends to that many newest keys only (its own
    document); None means to all of them. Computed in float32, no gradient flows through it.
    Returns float32 (sequences, heads) as `entropy_of_weights` does.
    """
    last, keys = query[:, :, -1:].detach().float(), key.detach().float()
    # A product and a sum, not a matmul: fused in a compiled block, exact where TF32 is allowed.
    scores = (last * keys).sum(-1) / math.sqrt(query.shape[-1])
    positions = key.shape[2]
    if lengths is None:
        return entropy_of_weights(scores.softmax(-1), positions)
    age = torch.arange(positions - 1, -1, -1, device=key.device)
    outside = age >= lengths[:, None]
    weights = scores.masked_fill(outside[:, None], -math.inf).softmax(-1)
    return entropy_of_weights(weights, lengths[:, None])


def entropy_of_weights(weights: Tensor, lengths: Tensor | int) -> Tensor:
    """−Σ a·log a / log(keys) of attention rows.

    `weights`: floating (sequences, heads, keys), rows sum to 1, 0 where masked.
    `lengths`: keys that a row attends to; an int, or int64 (sequences, 1).
    Returns float32 (sequences, heads) in [0, 1]; NaN where a weight is, and where a row has fewer
    than two keys: log 1 = 0 normalises nothing, and `entropy_sums` leaves such rows out.
    """
    entropy: Tensor = torch.special.entr(weights.float()).sum(-1)
    if isinstance(lengths, int):
        if lengths < 2:
            return torch.full_like(entropy, math.nan)
        # float32 rounding reaches 1.0000006 on uniform rows.
        return (entropy / math.log(lengths)).clamp(0.0, 1.0)
    normalised = (entropy / lengths.float().log()).clamp(0.0, 1.0)
    return normalised.masked_fill(lengths < 2, math.nan)


def entropy_sums(entropy: Tensor, lengths: Tensor | int) -> Tensor:
    """What a micro-batch adds to the statistic: sum, sum of squares and count over its sequences.

    `entropy`: float32 (sequences, heads) of `last_row_entropy`; `lengths` as there.
    Returns float64 (heads, 3): where attention is near uniform, float32 squares of values near 1
    would lose all of their spread. Rows with fewer than two keys add to none of the three; a NaN of
    a longer row stays, so that nothing is decided from it unseen.
    """
    entropy = entropy.double()
    if isinstance(lengths, int):
        if lengths < 2:
            return entropy.new_zeros(entropy.shape[1], 3)
        count = torch.full_like(entropy[0], entropy.shape[0])
        return torch.stack((entropy.sum(0), entropy.square().sum(0), count), dim=-1)
    counted = (lengths >= 2).expand_as(entropy)
    kept = torch.where(counted, entropy, 0.0)
    return torch.stack((kept.sum(0), kept.square().sum(0), counted.double().sum(0)), dim=-1)
