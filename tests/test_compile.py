"""Compiled blocks: one graph for each kind, whatever the layer, the heads and the factors."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from sgt_ds.config import ModelConfig
from sgt_ds.growth import Passes
from sgt_ds.model import Output, Transformer, loop_inputs

CONFIG = ModelConfig(hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, vocab_size=64)
TOKENS = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")


def run(model: Transformer, passes: Mapping[int, Passes], measure: bool = True) -> Output:
    model.zero_grad()
    output: Output = model(
        TOKENS[:, :-1], TOKENS[:, 1:], loops=loop_inputs(passes, CPU), measure=measure
    )
    assert output.loss is not None
    output.loss.backward()
    return output


def gradients(model: Transformer) -> list[Tensor]:
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.fixture(scope="module")
def compiled() -> Transformer:
    torch._dynamo.reset()
    return Transformer(CONFIG, seed=3, compile_blocks=True)


# In the order of a run: each kind is new once, and known wherever and with whatever it comes again.
KINDS: dict[str, list[dict[int, Passes]]] = {
    "vanilla": [{}],
    "decay": [
        {3: Passes(1, "attention", None, ((1.0, 0.9, 1.0, 0.9),))},
        {3: Passes(1, "attention", None, ((1.0, 0.0, 1.0, 0.0),))},
        {1: Passes(1, "attention", None, ((0.5, 0.5, 1.0, 1.0),))},
    ],
    "ramp": [
        {3: Passes(1, "attention", (0, 2), ((0.0, 0.0),))},
        {2: Passes(1, "attention", (1, 3), ((1.0, 1.0),))},
    ],
}


@pytest.mark.parametrize("name", KINDS)
def test_another_layer_head_or_factor_compiles_again_or_computes_otherwise(
    name: str, compiled: Transformer
) -> None:
    eager = Transformer(CONFIG, seed=3)
    for index, passes in enumerate(KINDS[name]):
        before = graphs()
        output = run(compiled, passes)
        assert graphs() == before or index == 0, passes
        expected = run(eager, passes)
        assert output.loss is not None
        assert expected.loss is not None
        assert output.entropy is not None
        assert expected.entropy is not None
        assert abs(output.loss - expected.loss) <= 1e-6
        assert (output.entropy - expected.entropy).abs().max() <= 1e-6
        for one, other in zip(gradients(compiled), gradients(eager), strict=True):
            assert (one - other).abs().max() <= 1e-6
    assert not counters["graph_break"]


def test_a_second_model_compiles_what_the_first_did(compiled: Transformer) -> None:
    run(compiled, {})
    before = graphs()
    run(Transformer(CONFIG, seed=4, compile_blocks=True), {})
    assert graphs() == before


def test_a_new_document_layout_compiles_again_on_a_cpu(compiled: Transformer) -> None:
    run(compiled, {})
    before = graphs()
    eager = Transformer(CONFIG, seed=3)
    for border in (3, 9, 15):
        starts = torch.zeros_like(TOKENS[:, :-1])
        starts[:, border:] = border
        both = [
            model(TOKENS[:, :-1], TOKENS[:, 1:], measure=True, document_starts=starts)
            for model in (compiled, eager)
        ]
        assert abs(both[0].loss - both[1].loss) <= 1e-6
    assert graphs() == before
    assert not counters["graph_break"]
