"""Attention and block loops against a naive reference that computes every head and masks.

The reference is float64 throughout: full softmax matrices, one loop over heads, factors for all
heads and passes. It shares nothing with the model but the names of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from sgt_ds.config import Entry, GrowthConfig, ModelConfig
from sgt_ds.growth import Entropy, Passes, build_policy, passes_at
from sgt_ds.model import Transformer, loop_inputs
from sgt_ds.model.narrow import narrow_loop
from sgt_ds.model.rope import rotary_tables

CONFIG = ModelConfig(hidden_size=32, intermediate_size=40, num_layers=4, num_heads=4, vocab_size=60)
CPU = torch.device("cpu")

SOME = (1, 3)
CASES: dict[str, dict[int, Passes]] = {
    "vanilla": {},
    "no factor, depth 1": {3: Passes(1, "attention", SOME, None)},
    "no factor, depth 3": {2: Passes(3, "attention", (0, 2), None)},
    "all heads": {1: Passes(2, "attention", None, None)},
    "decay": {3: Passes(1, "attention", None, ((0.7, 1.0, 0.7, 1.0),))},
    "decay, one head gone": {3: Passes(2, "attention", None, ((0.3, 1.0, 0.0, 1.0),) * 2)},
    "ramp": {3: Passes(1, "attention", SOME, ((0.25, 0.25),))},
    "ramp of the third pass": {
        2: Passes(3, "attention", SOME, ((1.0, 1.0), (1.0, 1.0), (0.4, 0.4)))
    },
    "whole block": {2: Passes(1, "block", None, None)},
    "whole block, three times": {1: Passes(3, "block", None, None)},
    "several layers": {
        1: Passes(1, "attention", None, ((1.0, 0.5, 0.5, 1.0),)),
        2: Passes(2, "attention", (0, 3), None),
        3: Passes(3, "attention", (2,), ((1.0,), (1.0,), (0.1,))),
    },
    "scopes side by side": {
        0: Passes(1, "block", None, None),
        3: Passes(2, "attention", (1,), None),
    },
}  # fmt: skip


def reference_logits(
    weights: Mapping[str, Tensor], tokens: Tensor, passes: Mapping[int, Passes]
) -> Tensor:
    """Float64 logits: every head of every pass is computed, then masked by a factor of 0 or more."""
    heads, head_size = CONFIG.num_heads, CONFIG.head_size
    positions = tokens.shape[1]
    # The model's angles are float32 by contract.
    frequency = 1.0 / CONFIG.rope_theta ** (torch.arange(0, head_size, 2).float() / head_size)
    angles = torch.arange(positions).float().outer(frequency)
    turn = torch.complex(angles.cos(), angles.sin()).to(torch.complex128)
    future = torch.ones(positions, positions, dtype=torch.bool).triu(1)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps).sqrt() * weight

    def rotated(x: Tensor) -> Tensor:
        half = head_size // 2
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat((turned.real, turned.imag), -1)

    def attention(x: Tensor, layer: int, factors: tuple[float, ...]) -> Tensor:
        name = f"blocks.{layer}."
        normed = norm(x, weights[name + "attention_norm.weight"])
        total = torch.zeros_like(x)
        for head in range(heads):
            query, key, value = (
                normed @ weights[name + "qkv.weight"][index, head].T for index in range(3)
            )
            scores = rotated(query) @ rotated(key).transpose(1, 2) / math.sqrt(head_size)
            mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ value
            total = total + factors[head] * (mixed @ weights[name + "output.weight"][:, head].T)
        return total

    def feed_forward(x: Tensor, layer: int) -> Tensor:
        name = f"blocks.{layer}."
        normed = norm(x, weights[name + "mlp_norm.weight"])
        gate, up = (normed @ part.T for part in weights[name + "gate_up.weight"].chunk(2))
        return (gate * gate.sigmoid() * up) @ weights[name + "down.weight"].T

    every = (1.0,) * heads
    x = weights["embedding.weight"][tokens]
    for layer in range(CONFIG.num_layers):
        x = x + attention(x, layer, every)
        run = passes.get(layer)
        if run is not None and run.scope == "attention":
            chosen = range(heads) if run.heads is None else run.heads
            for index in range(run.depth):
                factors = [0.0] * heads
                for place, head in enumerate(chosen):
                    given = 1.0 if run.scale is None else run.scale[index][place]
                    factors[head] = torch.tensor(given).item()  # as float32
                x = x + attention(x, layer, tuple(factors))
        x = x + feed_forward(x, layer)
        for _ in range(run.depth if run is not None and run.scope == "block" else 0):
            x = x + attention(x, layer, every)
            x = x + feed_forward(x, layer)
    return norm(x, weights["norm.weight"]) @ weights["lm_head.weight"].T


def double_model(**options: bool) -> Transformer:
    model = Transformer(CONFIG, seed=11, **options).double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():  # uneven norms, sharp attention: a misplaced factor must show
        for weight in model.parameters():
            weight.mul_(10.0 if weight.dim() > 1 else 1.0)
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return model


TOKENS = torch.randint(CONFIG.vocab_size, (2, 22), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("name", CASES)
def test_a_looped_pass_or_its_gradient_differs_from_the_naive_one(
    name: str, checkpointing: bool
) -> None:
    passes = CASES[name]
    model = double_model(activation_checkpointing=checkpointing)
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]
    loops = loop_inputs(passes, CPU)

    copies = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    expected = reference_logits(copies, inputs, passes)
    assert (model(inputs, loops=loops).logits - expected).abs().max() <= 1e-10

    loss = model(inputs, targets, loops=loops, measure=True).loss
    loss.backward()
    expected_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten())
    expected_loss.backward()
    assert abs(loss - expected_loss) <= 1e-10
    for weight_name, weight in model.named_parameters():
        apart = (weight.grad - copies[weight_name].grad).abs().max()
        assert apart <= 1e-10, weight_name


def test_a_ramp_at_its_first_step_changes_a_logit() -> None:
    model = Transformer(CONFIG, seed=1)
    shallow = loop_inputs({2: Passes(1, "attention", SOME, ((1.0, 1.0),))}, CPU)
    entering = {
        "first": ({}, {2: Passes(1, "attention", SOME, ((0.0, 0.0),))}),
        "deeper": (shallow, {2: Passes(2, "attention", SOME, ((1.0, 1.0), (0.0, 0.0)))}),
    }
    for before, after in entering.values():
        without = model(TOKENS, loops=before).logits
        assert torch.equal(model(TOKENS, loops=loop_inputs(after, CPU)).logits, without)


@pytest.mark.parametrize("stages", [[3, 1], [2, 1]])
@pytest.mark.parametrize("entry", ["ramp", "decay", "none"])
@pytest.mark.parametrize("method", ["sgt", "high_entropy_loop", "low_entropy_loop"])
def test_a_growth_event_by_ramp_changes_a_logit(
    method: str, entry: Entry, stages: list[int]
) -> None:
    """All events of a run, each with the passes before and after it. Other entries do change some."""
    growth = GrowthConfig(
        layers=2 if method == "sgt" else [1, 2],
        heads=stages[0],
        k_max=2,
        loops=3,
        stages=stages,
        t_start=4,
        interval=4,
        entry=entry,
    )
    policy = build_policy(method, growth, CONFIG)
    model = Transformer(CONFIG.model_copy(update={"init_std": 0.2}), seed=1)
    generator, changes = torch.Generator().manual_seed(0), []
    state, step = policy.initial_state(), growth.t_start
    while policy.is_due(step, state):
        rows = torch.rand(CONFIG.num_layers, CONFIG.num_heads, generator=generator) / 10
        rows += torch.arange(CONFIG.num_layers)[:, None] / 5  # deeper layers are chosen first
        mean = tuple(map(tuple, rows.tolist()))
        after = policy.decide(step, Entropy(mean, mean), state).after
        there, then = (
            model(
                TOKENS,
                loops=loop_inputs(
                    passes_at(
                        each,
                        step,
                        entry=entry,
                        interval=growth.interval,
                        num_heads=CONFIG.num_heads,
                    ),
                    CPU,
                ),
            ).logits
            for each in (state, after)
        )
        changes.append((then - there).abs().max().item())
        state, step = after, step + growth.interval
    assert len(changes) == (4 if method == "sgt" else 2)
    if entry == "ramp":
        assert changes == [0.0] * len(changes)
    else:
        assert changes[0] > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_a_head_that_takes_the_stream_away_leaves_nan(seed: int, dtype: torch.dtype) -> None:
    """One position, whose only head gives −share of the stream: its square is lost in rounding."""
    width, size = 64, 16
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q[:, :size]
    coordinates = torch.randn(2, 1, size, generator=generator)
    # RMS of the stream: 1, 100; what is left of it then is beside ε, or far above.
    for share, scale in ((0.99, 1.0), (1.0, 1.0), (100.0, 100.0)):
        stream = coordinates @ basis.t()
        stream = stream * (scale / stream.square().mean(-1, keepdim=True).sqrt())
        qkv = torch.zeros(3, 1, size, width)
        qkv[2, 0] = basis.t()
        output = -share * basis[:, None]
        x, norm, qkv, output = (
            part.to(dtype).requires_grad_() for part in (stream, torch.ones(width), qkv, output)
        )
        tables = rotary_tables(size, 10000.0, 1)
        left = narrow_loop(x, norm, qkv, output, *tables, 1e-6, 3, None, None)
        left.float().square().sum().backward()
        for found in (left, x.grad, norm.grad, qkv.grad, output.grad):
            assert found is not None
            assert found.isfinite().all()


def test_a_ramp_at_its_end_differs_from_no_entry() -> None:
    model = Transformer(CONFIG, seed=1)
    full = loop_inputs({2: Passes(2, "attention", SOME, ((1.0, 1.0),) * 2)}, CPU)
    plain = loop_inputs({2: Passes(2, "attention", SOME, None)}, CPU)
    assert torch.equal(model(TOKENS, loops=full).logits, model(TOKENS, loops=plain).logits)


def test_a_method_that_does_not_loop_yet_differs_from_vanilla() -> None:
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]
    vanilla, sgt = Transformer(CONFIG, seed=1), Transformer(CONFIG, seed=1)
    first = vanilla(inputs, targets)
    second = sgt(inputs, targets, loops=loop_inputs({}, CPU), measure=True)
    first.loss.backward()
    second.loss.backward()
    assert torch.equal(first.loss, second.loss)
    for one, other in zip(vanilla.parameters(), sgt.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_loop_computes_heads_that_it_does_not_use() -> None:
    """The counter of torch of matrix operations sees h heads a pass, not all of them."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(passes: Mapping[int, Passes]) -> int:
        model = Transformer(CONFIG)
        with FlopCounterMode(display=False) as counter:
            model(TOKENS[:, :-1], TOKENS[:, 1:], loops=loop_inputs(passes, CPU)).loss.backward()
        return counter.get_total_flops()

    vanilla = flops({})
    one = flops({2: Passes(1, "attention", (2,), None)}) - vanilla
    every = flops({2: Passes(1, "attention", None, None)}) - vanilla
    assert one * CONFIG.num_heads == every
    assert flops({2: Passes(3, "attention", (0, 2, 3), None)}) - vanilla == 9 * one
    # Where half of the heads or fewer loop, passes beyond the first cost less than the first.
    assert flops({2: Passes(3, "attention", (0, 2), None)}) - vanilla < 6 * one
