"""The accountant's formula against torch's own count of the operations of the real model."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sgt_ds.config import PRESETS, ModelConfig
from sgt_ds.flops import loop_flops_per_token, vanilla_flops_per_token
from sgt_ds.growth import Passes
from sgt_ds.model import Transformer, loop_inputs

SEQUENCES, POSITIONS = 2, 24


def scaled_down(preset: str) -> ModelConfig:
    """A preset's layers, heads and proportions at an eighth of its width, odd vocabulary."""
    shape = PRESETS[preset]
    factor = 8 if shape.hidden_size > 128 else 1
    return shape.model_copy(
        update={
            "hidden_size": shape.hidden_size // factor,
            "intermediate_size": shape.intermediate_size // factor,
            "vocab_size": 250,
        }
    )


def counted(network: Transformer, passes: Mapping[int, Passes]) -> int:
    """Operations of forward and backward by torch's counter, whole micro-batch.

    The math kernel computes all N × N scores with plain matrix products, as the formula counts.
    """
    tokens = torch.randint(network.config.vocab_size, (SEQUENCES, POSITIONS + 1))
    loops = loop_inputs(passes, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss = network(tokens[:, :-1], tokens[:, 1:], loops=loops).loss
        assert loss is not None
        loss.backward()
    return int(counter.get_total_flops())


def named_differences(model: ModelConfig) -> dict[str, int]:
    """What the formula counts and no matrix product does (+), or the reverse (−), a token.

    Nothing else differs: softmax, RoPE, SwiGLU, residuals and the loss are in neither count, and
    causality is in neither either, for both count all N keys of every query.
    """
    width = model.hidden_size
    return {
        "norm weights counted as if each were a product": 6 * (2 * model.num_layers + 1) * width,
        "embedding's gradient counted as two products": 4 * model.vocab_size * width,
        "padding rows of the output matrix": -6
        * (model.padded_vocab_size - model.vocab_size)
        * width,
    }


def done_in_fewer(model: ModelConfig, passes: Mapping[int, Passes]) -> int:
    """What the formula counts of passes in the heads' own space, and no product does; all tokens.

    By the formula each pass has 4·c·d multiplications a token, c being the width of the heads. There
    it is 4·c·d once, 4·c² for each pass but the first, c·d to bring all back, and 4·c²·d once a
    micro-batch; each twice, and twice again for either gradient.
    """
    width, fewer = model.hidden_size, 0
    for run in passes.values():
        heads = run.head_count(model.num_heads)
        once = run.depth == 1 and run.scale is None
        if run.scope == "block" or once or 2 * heads > model.num_heads:
            continue
        own = heads * model.head_size
        done = 5 * own * width + 4 * (run.depth - 1) * own**2
        fewer += SEQUENCES * POSITIONS * 6 * (4 * run.depth * own * width - done)
        fewer -= 6 * 4 * own**2 * width if run.depth > 1 else 0
    return fewer


def grown(model: ModelConfig) -> dict[str, dict[int, Passes]]:
    heads, last = model.num_heads, model.num_layers - 1
    falling = ((1.0,) * 2 + (0.5,) * (heads - 2),)
    return {
        "vanilla": {},
        "two heads, three deep, in two layers": {
            last: Passes(3, "attention", (0, heads - 1), None),
            1: Passes(1, "attention", (1, 2), None),
        },
        "most heads, twice": {last: Passes(2, "attention", tuple(range(1, heads)), None)},
        "entering with decay: all heads": {last: Passes(1, "attention", None, falling)},
        "entering with a ramp, first": {2: Passes(1, "attention", (0, 1), ((0.25, 0.25),))},
        "entering with a ramp": {2: Passes(2, "attention", (0, 1), ((1.0, 1.0), (0.25, 0.25)))},
        "whole block, twice": {1: Passes(2, "block", None, None)},
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_formula_that_departs_from_the_operations_of_the_model(preset: str) -> None:
    model = scaled_down(preset)
    network = Transformer(model)
    tokens = SEQUENCES * POSITIONS
    vanilla = vanilla_flops_per_token(model, POSITIONS)
    outside = sum(named_differences(model).values())
    for name, passes in grown(model).items():
        formula = vanilla + loop_flops_per_token(model, POSITIONS, passes) - outside
        expected = tokens * formula - done_in_fewer(model, passes)
        assert counted(network, passes) == expected, name
