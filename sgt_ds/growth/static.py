"""Methods `block_loop` and `attention_loop`: given layers loop from step 0 on. Paper, baselines."""

from __future__ import annotations

from sgt_ds.config import GrowthConfig, ModelConfig
from sgt_ds.growth.layers import given_layers
from sgt_ds.growth.state import Loop, State
from sgt_ds.growth.vanilla import Static


def block_loop(growth: GrowthConfig, model: ModelConfig) -> Static:
    """Whole blocks, FFN included, run `loops` times more."""
    loop = Loop(depth=growth.loops, heads=None, scope="block", step=0, entered=0)
    return Static(State(dict.fromkeys(given_layers(growth, model), loop)))


def attention_loop(growth: GrowthConfig, model: ModelConfig) -> Static:
    """The attention of given layers, all heads, runs `loops` times more."""
    heads = tuple(range(model.num_heads))
    loop = Loop(depth=growth.loops, heads=heads, scope="attention", step=0, entered=0)
    return Static(State(dict.fromkeys(given_layers(growth, model), loop)))
