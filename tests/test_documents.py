"""Document masks: a row of several documents against each of them passed alone, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from test_model_loops import CASES, CONFIG, double_model
from torch import Tensor
from torch._dynamo.utils import counters

from sgt_ds.model import Transformer, loop_inputs
from sgt_ds.model.attention import attention
from sgt_ds.model.documents import TILE, _tiles, documents_of

CPU = torch.device("cpu")
# Sequences of 21 positions: one document, many, single tokens in the middle and at the end.
ROWS = ((21,), (5, 9, 7), (1, 1, 18, 1), (20, 1))
TOKENS = torch.randint(
    CONFIG.vocab_size, (len(ROWS), 22), generator=torch.Generator().manual_seed(5)
)


def starts_of(rows: Sequence[Sequence[int]]) -> Tensor:
    starts = []
    for lengths in rows:
        begin = [sum(lengths[:index]) for index in range(len(lengths))]
        starts.append(torch.repeat_interleave(torch.tensor(begin), torch.tensor(lengths)))
    return torch.stack(starts)


STARTS = starts_of(ROWS)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("name", CASES)
def test_a_masked_row_differs_from_its_documents_passed_alone(
    name: str, checkpointing: bool
) -> None:
    loops = loop_inputs(CASES[name], CPU)
    masked, alone = double_model(activation_checkpointing=checkpointing), double_model()
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]

    output = masked(inputs, loops=loops, measure=True, document_starts=STARTS)
    loss = masked(inputs, targets, loops=loops, document_starts=STARTS).loss
    loss.backward()

    sums = torch.zeros(CONFIG.num_layers, CONFIG.num_heads, 3)
    nats = torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(ROWS):
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            ends_row = start + length == inputs.shape[1]
            expected = alone(inputs[row : row + 1, part], loops=loops, measure=ends_row)
            assert (output.logits[row, part] - expected.logits[0]).abs().max() <= 1e-10
            # Targets cross the boundary: the last position still predicts the next document's first.
            nats = nats + torch.nn.functional.cross_entropy(
                expected.logits[0, :, : CONFIG.padded_vocab_size],
                targets[row, part],
                reduction="sum",
            )
            if ends_row:
                sums += expected.entropy
            start += length
    (nats / targets.numel()).backward()
    assert abs(loss - nats / targets.numel()) <= 1e-10
    assert (output.entropy - sums).abs().max() <= 1e-6  # float32 by contract, a sum of three
    assert (output.entropy[..., 2] == sum(lengths[-1] > 1 for lengths in ROWS)).all()
    for (weight_name, one), other in zip(
        masked.named_parameters(), alone.parameters(), strict=True
    ):
        assert (one.grad - other.grad).abs().max() <= 1e-10, weight_name


def test_one_document_a_row_differs_from_no_mask() -> None:
    model = Transformer(CONFIG, seed=1)
    whole = torch.zeros_like(TOKENS)
    with_mask = model(TOKENS, measure=True, document_starts=whole)
    without = model(TOKENS, measure=True)
    assert (with_mask.logits - without.logits).abs().max() <= 1e-5
    assert (with_mask.entropy - without.entropy).abs().max() <= 1e-5


def test_tiles_hide_a_pair_of_one_document_or_build_a_square_mask() -> None:
    """The tiles of CUDA's kernel, whose arithmetic runs anywhere, against all pairs of positions."""
    generator = torch.Generator().manual_seed(0)
    length = 5 * TILE + 40
    borders = torch.rand(7, length, generator=generator) < torch.tensor(
        [0.0, 0.001, 0.004, 0.01, 0.1, 0.5, 1.0]
    ).view(-1, 1)
    here = torch.arange(length)
    starts = torch.where(borders, here, 0).cummax(1).values
    tiles = _tiles(starts)
    pairs = (here[:, None] >= here) & (here >= starts[:, :, None])
    count = math.ceil(length / TILE)
    padded = torch.zeros(7, count * TILE, count * TILE, dtype=torch.bool)
    padded[:, :length, :length] = pairs
    by_tile = padded.view(7, count, TILE, count, TILE).transpose(2, 3)  # a view
    met = by_tile.any((-1, -2))
    padded[:, length:] = True  # queries past the end, which nobody reads
    whole = by_tile.all((-1, -2))

    def chosen(numbers: Tensor, indices: Tensor) -> Tensor:
        result = torch.zeros(7, count, count, dtype=torch.bool)
        for sequence in range(7):
            for query in range(count):
                some = indices[sequence, 0, query, : int(numbers[sequence, 0, query])].long()
                result[sequence, query, some] = True
        return result

    partial = chosen(tiles.kv_num_blocks, tiles.kv_indices)
    full = chosen(tiles.full_kv_num_blocks, tiles.full_kv_indices)
    assert not (partial & full).any()
    assert torch.equal(partial | full, met)
    assert not (full & ~whole).any()
    assert full.any()


def test_tiles_in_a_compiled_block_attend_elsewhere_or_compile_again() -> None:
    """CUDA's path compiled for this CPU, which has no backward of it: once, whatever the documents."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    length, heads, head_size = 2 * TILE + 44, CONFIG.num_heads, 16
    width = heads * head_size
    here = torch.arange(length)
    weights = (
        torch.ones(width),
        torch.randn(3, heads, head_size, width, generator=generator) / 4,
        torch.randn(width, heads, head_size, generator=generator) / 8,
    )
    compiled = torch.compile(attention, dynamic=False)
    graphs = set()
    for rate in (0.0, 0.02, 0.5):
        borders = torch.rand(2, length, generator=generator) < rate
        starts = torch.where(borders, here, 0).cummax(1).values
        documents = documents_of(starts)
        tiles = documents._replace(lengths=None, tiles=_tiles(starts))
        x = torch.randn(2, length, width, generator=generator)
        angles = documents.positions[:, :, None] / torch.arange(1, head_size // 2 + 1)
        others = (angles.cos(), angles.sin(), 1e-6)
        with torch.no_grad():
            expected = attention(x, *weights, *others, documents)[0]
            assert (compiled(x, *weights, *others, tiles)[0] - expected).abs().max() <= 1e-4
        graphs.add(counters["stats"]["unique_graphs"])
    assert len(graphs) == 1
