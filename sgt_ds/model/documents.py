"""Attention that stays within a document, from document starts alone. Knows no layer and no weight.

A layout is O(positions): no N × N mask is ever built. On CUDA one flex attention kernel skips the
tiles outside the documents; elsewhere each document is one call of scaled_dot_product_attention.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

# Side of a tile of flex attention: its kernels' own default.
TILE = 128


class Documents(NamedTuple):
    """Where a micro-batch's documents lie. One is made for a forward pass, all layers use it."""

    positions: Tensor
    """int64 (sequences, positions): each position's place in its own document."""
    last_lengths: Tensor
    """int64 (sequences,): length of the last position's document, within the sequence."""
    lengths: tuple[int, ...] | None
    """Lengths of all documents, sequence by sequence; None on CUDA, which must not wait for it."""
    tiles: BlockMask | None
    """On CUDA: which tiles of queries and keys meet in a document."""


def documents_of(starts: Tensor) -> Documents:
    """The layout of a micro-batch.

    `starts`: int64 (sequences, positions), for each position the position at which its document
    starts in this sequence: 0 up to the first boundary, rising. Its device decides what computes.
    """
    length = starts.shape[1]
    here = torch.arange(length, device=starts.device)
    last_lengths = length - starts[:, -1]
    if starts.device.type == "cuda":
        return Documents(here - starts, last_lengths, None, _tiles(starts))
    first = torch.nonzero((here == starts).flatten()).flatten()
    ends = torch.cat((first[1:], first.new_tensor([starts.numel()])))
    return Documents(here - starts, last_lengths, tuple((ends - first).tolist()), None)


def document_attention(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """Causal attention within documents.

    All floating (sequences, heads, positions, head_size), and so the result.
    """
    if documents.tiles is not None:
        # Uncompiled, flex attention writes the whole matrix of scores; inside a compiled block it
        # is part of the block's own graph.
        attend = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
        # One layout for all three: torch 2.13's compiler for CPUs sums wrongly, without a word,
        # where values lie otherwise than queries and keys.
        query, key, value = (part.contiguous() for part in (query, key, value))
        return cast(Tensor, attend(query, key, value, block_mask=documents.tiles))
    assert documents.lengths is not None
    sequences, heads, positions, head_size = query.shape
    # One long row, so that each side's gradient is one concatenation, whatever the documents'
    # number.
    parts = [
        tensor.transpose(0, 1).reshape(1, heads, sequences * positions, head_size)
        for tensor in (query, key, value)
    ]
    split = zip(*(part.split_with_sizes(documents.lengths, 2) for part in parts), strict=True)
    mixed = [F.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in split]
    joined = torch.cat(mixed, dim=2).view(heads, sequences, positions, head_size)
    return joined.transpose(0, 1)


def _tiles(starts: Tensor) -> BlockMask:
    """Tiles of the causal document mask, computed tile by tile: a tile of queries meets the tiles
    of keys from its first position's document on. `create_block_mask` would look at every position
    pair.
    """
    length = starts.shape[1]
    count = -(-length // TILE)
    firsts = torch.arange(count, device=starts.device) * TILE
    lasts = (firsts + TILE - 1).clamp(max=length - 1)
    earliest, latest = starts[:, firsts], starts[:, lasts]  # starts never fall along a sequence
    tiles = torch.arange(count, device=starts.device)
    met = (tiles >= (earliest // TILE)[..., None]) & (tiles <= tiles[:, None])
    # Whole: every key of the tile is visible to every query of the other.
    whole = (firsts >= latest[..., None]) & (tiles < tiles[:, None])
    partial = met & ~whole

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        numbers = chosen.sum(-1, dtype=torch.int32)
        return numbers[:, None].contiguous(), order[:, None].to(torch.int32).contiguous()

    def visible(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= starts[sequence, query])

    return BlockMask.from_kv_blocks(
        *listed(partial),
        *listed(whole),
        BLOCK_SIZE=TILE,
        mask_mod=visible,
        seq_lengths=(length, length),
    )


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)
