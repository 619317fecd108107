"""The last row's entropy against float64, its edge cases, its sums and its memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sgt_ds.config import PRESETS, ModelConfig
from sgt_ds.model import (
    Transformer,
    entropy_of_weights,
    entropy_sums,
    last_row_entropy,
)


def reference(query: Tensor, key: Tensor, lengths: list[int]) -> Tensor:
    """Float64, one row after another, with 0·log 0 = 0 by hand."""
    rows = torch.zeros(query.shape[:2], dtype=torch.float64)
    for sequence, length in enumerate(lengths):
        for head in range(query.shape[1]):
            keys = key[sequence, head, key.shape[2] - length :].double()
            scores = keys @ query[sequence, head, -1].double() / math.sqrt(query.shape[3])
            weights = (scores - scores.max()).exp()
            weights = weights / weights.sum()
            total = -sum(a * math.log(a) for a in weights.tolist() if a > 0)
            rows[sequence, head] = total / math.log(length)
    return rows


def random_pair(dtype: torch.dtype, sharpness: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    query = sharpness * torch.randn(3, 4, 50, 16, generator=generator)
    return query.to(dtype), torch.randn(3, 4, 50, 16, generator=generator).to(dtype)


@pytest.mark.parametrize("sharpness", [0.0, 0.1, 1.0, 10.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_entropy_drifts_from_float64(dtype: torch.dtype, sharpness: float) -> None:
    query, key = random_pair(dtype, sharpness)
    entropy = last_row_entropy(query, key)
    assert entropy.dtype == torch.float32
    assert ((entropy >= 0) & (entropy <= 1)).all()
    expected = reference(query, key, [50] * 3)
    # Scores reach ±4·sharpness; float32 keeps them to 2^-22 of that, entropy moves no faster.
    assert (entropy - expected).abs().max() <= 2e-6 * max(1.0, sharpness)


def test_masked_document_is_normalised_by_the_whole_sequence() -> None:
    query, key = random_pair(torch.float32, 1.0)
    lengths = torch.tensor([50, 7, 2])
    entropy = last_row_entropy(query, key, lengths)
    assert (entropy - reference(query, key, lengths.tolist())).abs().max() <= 2e-6
    cut = last_row_entropy(query[1:2, :, -7:], key[1:2, :, -7:])
    assert torch.allclose(entropy[1:2], cut, atol=1e-6)


def test_a_row_with_one_key_enters_sum_or_count() -> None:
    query, key = random_pair(torch.float32, 1.0)
    lengths = torch.tensor([1, 9, 50])
    entropy = last_row_entropy(query, key, lengths)
    assert entropy[0].isnan().all()
    sums = entropy_sums(entropy, lengths[:, None])
    assert torch.equal(sums[:, 2], torch.full((4,), 2.0, dtype=torch.float64))
    assert torch.allclose(sums[:, 0], entropy[1:].double().sum(0))
    assert torch.allclose(sums[:, 1], entropy[1:].double().square().sum(0))

    model = Transformer(PRESETS["tiny"])
    output = model(torch.tensor([[5], [6]]), measure=True)
    assert torch.equal(output.entropy, torch.zeros(6, 4, 3, dtype=torch.float64))


def test_one_key_with_all_the_mass_gives_nan_or_less_than_zero() -> None:
    weights = torch.zeros(1, 2, 5)
    weights[0, 0, 3] = 1.0
    weights[0, 1] = 0.2
    assert entropy_of_weights(weights, 5).tolist() == [[0.0, 1.0]]
    assert entropy_of_weights(weights.half(), 5)[0, 0] == 0.0


def test_uniform_rows_pass_one() -> None:
    # Unclamped float32 reaches 1.0000006 on some of these.
    for keys in range(2, 3000, 37):
        entropy = last_row_entropy(torch.zeros(1, 1, 1, 8), torch.randn(1, 1, keys, 8))
        assert 1 - 1e-6 <= entropy.item() <= 1.0


def test_near_uniform_rows_lose_their_spread() -> None:
    # As at the start of training: all values within 1e-4 of each other, next to 1.
    entropy = 0.9997 + 1e-4 * torch.rand(8, 4, generator=torch.Generator().manual_seed(0))
    total, squares, count = entropy_sums(entropy, 50).unbind(-1)
    variance = (squares - total.square() / count) / (count - 1)
    assert torch.allclose(variance, entropy.double().var(0), rtol=1e-6)


def test_a_nan_is_hidden() -> None:
    query, key = random_pair(torch.float32, 1.0)
    key[1, 2, 4, 0] = math.nan
    sums = entropy_sums(last_row_entropy(query, key), 50)
    assert sums[2, :2].isnan().all()
    assert sums[[0, 1, 3]].isfinite().all()
    assert torch.equal(sums[:, 2], torch.full((4,), 3.0, dtype=torch.float64))


def test_sums_depend_on_the_split_into_micro_batches() -> None:
    model = Transformer(PRESETS["tiny"], seed=1)
    tokens = torch.randint(512, (8, 32), generator=torch.Generator().manual_seed(2))
    whole = model(tokens, measure=True).entropy.double()
    for size in (1, 2, 4):
        split = sum(model(part, measure=True).entropy.double() for part in tokens.split(size))
        # Eight values of about 1, each rounded to float32 in its own batch.
        assert (split - whole).abs().max() <= 8 * 2**-21
        assert torch.equal(split[..., 2], whole[..., 2])


def test_entropy_is_that_of_the_main_pass_and_of_every_head() -> None:
    config = ModelConfig(
        hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, vocab_size=64
    )
    model = Transformer(config, seed=1)
    with torch.no_grad():
        model.blocks[0].qkv.weight.mul_(30)
    from sgt_ds.growth import Passes
    from sgt_ds.model import loop_inputs

    tokens = torch.randint(64, (4, 20), generator=torch.Generator().manual_seed(2))
    plain = model(tokens, measure=True).entropy
    assert plain[0, 0, 0] != plain[0, 1, 0]
    for scope, heads in (("attention", (1,)), ("block", None)):
        loops = loop_inputs({0: Passes(2, scope, heads, None)}, torch.device("cpu"))
        assert torch.equal(model(tokens, loops=loops, measure=True).entropy, plain)


def test_measuring_changes_a_gradient() -> None:
    tokens = torch.randint(512, (2, 33), generator=torch.Generator().manual_seed(2))
    gradients = []
    for measure in (False, True):
        model = Transformer(PRESETS["tiny"], seed=1)
        output = model(tokens[:, :-1], tokens[:, 1:], measure=measure)
        assert (output.entropy is not None) == measure
        output.loss.backward()
        gradients.append([weight.grad for weight in model.parameters()])
        if measure:
            assert not output.entropy.requires_grad
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Callable[..., Any]:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return made


def test_the_measure_builds_a_matrix_of_all_positions() -> None:
    positions = 512
    query, key = torch.randn(2, 1, 2, positions, 8)
    with Largest() as seen:
        last_row_entropy(query, key)
    assert 0 < seen.elements <= key.numel() < positions**2
    with Largest() as seen:
        last_row_entropy(query, key, torch.tensor([positions // 2]))
    assert seen.elements <= key.numel()
