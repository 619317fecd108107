"""The growth operator against a second, naive transcription of the paper's Algorithm 1."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgt_ds.config import PRESETS, GrowthConfig, ModelConfig
from sgt_ds.growth import (
    Decision,
    Entropy,
    Policy,
    State,
    build_policy,
    loops_as_json,
    passes_at,
)

NAN = math.nan


@dataclass
class Algorithm1:
    """Lines 1–3 and 14–24 of the algorithm, literally, with mutable sets and exact fractions."""

    L: int
    K_max: int
    h: int
    t_start: int
    dt: int
    d2s: bool
    excluded: set[int]
    looping: set[int] = field(default_factory=set)
    K: dict[int, int] = field(default_factory=dict)
    S: dict[int, set[int]] = field(default_factory=dict)
    l_star: int | None = None

    def step(self, t: int, E: list[list[float]]) -> None:
        if not (t >= self.t_start and (t - self.t_start) % self.dt == 0):
            return
        if any(math.isnan(e) for row in E for e in row):
            return
        # The exact sum, rounded once: equal heads in another order are a tie.
        mean = [float(sum(map(Fraction, row))) / len(row) for row in E]
        C: set[int] = set()
        while len(C) < self.L:  # take the best remaining layer, the deeper of equals
            rest = [
                layer for layer in range(len(E)) if layer not in C and layer not in self.excluded
            ]
            best = max(mean[layer] for layer in rest)
            C.add(max(layer for layer in rest if mean[layer] == best))
        if self.l_star is not None and self.l_star in C and self.K[self.l_star] < self.K_max:
            self.K[self.l_star] += 1
            return
        if len(self.looping) < self.L:
            if self.d2s:
                bound = min(self.looping) if self.looping else math.inf
                choice = [layer for layer in C if layer not in self.looping and layer < bound]
                chosen = max(choice) if choice else None
            else:
                bound = max(self.looping) if self.looping else -math.inf
                choice = [layer for layer in C if layer not in self.looping and layer > bound]
                chosen = min(choice) if choice else None
            if chosen is None:
                return
            heads: set[int] = set()
            while len(heads) < self.h:
                left = [i for i in range(len(E[chosen])) if i not in heads]
                heads.add(min(i for i in left if E[chosen][i] == max(E[chosen][j] for j in left)))
            self.l_star = chosen
            self.S[chosen] = heads
            self.looping.add(chosen)
            self.K[chosen] = 1

    def loops(self) -> dict[str, dict[str, object]]:
        return {
            str(layer): {"depth": self.K[layer], "heads": sorted(self.S[layer])}
            for layer in sorted(self.looping)
        }


def shape(layers: int, heads: int) -> ModelConfig:
    return ModelConfig(
        hidden_size=2 * heads,
        intermediate_size=1,
        num_layers=layers,
        num_heads=heads,
        vocab_size=1,
    )


def entropy(rows: list[list[float]], stderr: float = NAN) -> Entropy:
    mean = tuple(tuple(row) for row in rows)
    return Entropy(mean, tuple((stderr,) * len(row) for row in rows))


@st.composite
def runs(draw: st.DrawFn) -> tuple[GrowthConfig, ModelConfig, list[list[list[float]]]]:
    """Settings, a shape, and the entropies of each step: few levels, so that ties abound."""
    layers, heads = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    excluded = draw(st.sets(st.integers(0, layers - 1), max_size=layers - 1))
    growth = GrowthConfig(
        k_max=draw(st.integers(1, 3)),
        layers=draw(st.integers(1, layers - len(excluded))),
        heads=draw(st.integers(1, heads)),
        t_start=draw(st.integers(0, 4)),
        interval=draw(st.integers(1, 3)),
        direction=draw(st.sampled_from(["d2s", "s2d"])),
        exclude_layers=sorted(excluded),
        entry=draw(st.sampled_from(["decay", "none", "ramp"])),
    )
    random_numbers = random.Random(draw(st.integers(0, 2**32)))
    levels = draw(st.sampled_from([1, 2, 4, 10, 1 << 20]))  # 1: everything ties
    hole = draw(st.sampled_from([0.0, 0.0, 0.01, 0.2]))
    steps = [
        [
            [
                NAN
                if random_numbers.random() < hole
                else random_numbers.randint(0, levels) / levels
                for _ in range(heads)
            ]
            for _ in range(layers)
        ]
        for _ in range(draw(st.integers(0, 24)))
    ]
    return growth, shape(layers, heads), steps


def grow(
    policy: Policy, steps: list[list[list[float]]]
) -> list[tuple[int, State, Decision | None]]:
    state, history = policy.initial_state(), []
    for step, rows in enumerate(steps, start=1):
        decision = None
        if policy.is_due(step, state):
            decision = policy.decide(step, entropy(rows), state)
            state = decision.after
        history.append((step, state, decision))
    return history


@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(runs())
def test_a_choice_that_the_papers_algorithm_would_not_make(
    run: tuple[GrowthConfig, ModelConfig, list[list[list[float]]]],
) -> None:
    growth, model, steps = run
    assert isinstance(growth.layers, int)
    policy = build_policy("sgt", growth, model)
    naive = Algorithm1(
        L=growth.layers,
        K_max=growth.k_max,
        h=growth.heads,
        t_start=growth.t_start,
        dt=growth.interval,
        d2s=growth.direction == "d2s",
        excluded=set(growth.exclude_layers),
    )
    before = policy.initial_state()
    for step, after, decision in grow(policy, steps):
        naive.step(step, steps[step - 1])
        assert loops_as_json(after) == naive.loops()
        assert after.growing_layer == naive.l_star
        # What holds whatever the entropies do:
        assert len(after.loops) <= growth.layers
        assert not set(growth.exclude_layers) & after.loops.keys()
        for layer, loop in before.loops.items():
            assert after.loops[layer].depth >= loop.depth
            assert after.loops[layer].heads == loop.heads
        new = sorted(after.loops.keys() - before.loops.keys())
        assert len(new) <= 1
        if new and before.loops and growth.direction == "d2s":
            assert new[0] < min(before.loops)
        if new and before.loops and growth.direction == "s2d":
            assert new[0] > max(before.loops)
        if decision is not None:
            again = policy.decide(step, entropy(steps[step - 1]), before)
            assert again == decision
            assert again.as_json() == Decision.from_json(decision.as_json()).as_json()
            assert (decision.rule == "stall") == (before == after)
        complete = len(after.loops) == growth.layers and (
            after.loops[after.growing_layer].depth == growth.k_max
            if after.growing_layer is not None
            else False
        )
        phase = "fixed" if complete else "warmup" if step < growth.t_start else "growing"
        assert policy.phase(step, after) == phase
        before = after


def test_order_of_summing_that_breaks_a_tie() -> None:
    """0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 differ in float64; the deeper layer must win."""
    growth = GrowthConfig(layers=1, heads=1, t_start=1, exclude_layers=[])
    rows = [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]]
    assert sum(rows[0]) > sum(rows[1])
    decision = build_policy("sgt", growth, shape(2, 3)).decide(1, entropy(rows), State())
    assert decision.candidates == (1,)


ROWS = [[0.5, 0.5], [0.5, 0.6], [0.9, 0.8], [0.7, 0.9]]


def sgt(**changes: object) -> Policy:
    values = {"k_max": 2, "layers": 2, "heads": 1, "t_start": 2, "interval": 2, **changes}
    return build_policy("sgt", GrowthConfig.model_validate(values), shape(4, 2))


def test_freeze_that_is_decided_twice_or_grows_once_more() -> None:
    history = grow(sgt(freeze_at=4), [ROWS] * 9)
    taken = [(step, d.rule, d.phase) for step, _, d in history if d is not None]
    assert taken == [(2, "activate", "growing"), (4, "freeze", "fixed")]
    assert sgt(freeze_at=3).phase(3, State()) == "fixed"
    # Between windows too, and before the first one.
    history = grow(sgt(freeze_at=1), [ROWS] * 9)
    assert [(step, d.rule) for step, _, d in history if d is not None] == [(1, "freeze")]


def test_stall_that_does_not_say_why() -> None:
    policy = sgt()
    blind = policy.decide(2, None, State())
    assert (blind.rule, blind.cause) == ("stall", "not measured")
    broken = [row[:] for row in ROWS]
    broken[0][1] = NAN  # an excluded layer's counts as well: the statistic is not sound
    named = policy.decide(2, entropy(broken), State())
    assert named.rule == "stall"
    assert "layer 0, head 1" in named.reason
    shallow = policy.decide(2, entropy(ROWS), State()).after
    # Layer 3 grew first; now the candidates are 1 and 2, and with K_max reached one is taken …
    swapped = [ROWS[0], ROWS[2], ROWS[2], [0.1, 0.1]]
    second = policy.decide(4, entropy(swapped), shallow)
    assert (second.rule, second.after.growing_layer) == ("activate", 2)
    # … and when that one leaves the candidates, nothing is left to do.
    gone = policy.decide(6, entropy([ROWS[0], ROWS[2], [0.1, 0.1], ROWS[2]]), second.after)
    assert (gone.rule, gone.cause) == ("stall", "candidate gone")
    # With L = 2 and layer 1 looping, d2s finds nothing shallower that is not excluded.
    only = policy.decide(2, entropy([ROWS[0], ROWS[2], [0.1, 0.2], [0.1, 0.1]]), State())
    assert only.after.growing_layer == 2
    first = sgt(layers=3, k_max=1).decide(
        2, entropy([ROWS[0], [0.9, 0.9], [0, 0], [0, 0]]), State()
    )
    assert first.after.growing_layer == 3
    low = State({1: first.after.loops[3]}, 1)
    none_left = sgt(layers=2, k_max=1).decide(2, entropy(ROWS), low)
    assert (none_left.rule, none_left.cause) == ("stall", "no eligible layer")


def test_choice_within_noise_that_passes_for_a_clear_one() -> None:
    policy = sgt()
    sure = policy.decide(2, entropy(ROWS, stderr=0.001), State())
    assert sure.margin is not None
    # Candidates 2 (0.85) and 3 (0.8); left out 1 (0.55). Heads of layer 3: 0.9 and 0.7.
    assert sure.margin.layer == pytest.approx(0.25 / (0.001 * math.sqrt(2)), rel=1e-3)
    assert sure.margin.head == pytest.approx(0.2 / (0.001 * math.sqrt(2)), rel=1e-3)
    assert not sure.margin.within_noise
    doubtful = policy.decide(2, entropy(ROWS, stderr=0.12), State())
    assert doubtful.margin is not None
    assert doubtful.margin.within_noise
    assert "within noise" in doubtful.reason
    unknown = policy.decide(2, entropy(ROWS), State())
    assert unknown.margin is not None
    assert (unknown.margin.layer, unknown.margin.within_noise) == (None, False)


@pytest.mark.parametrize(("method", "sign"), [("high_entropy_loop", 1), ("low_entropy_loop", -1)])
def test_entropy_loop_that_departs_from_the_papers_two_windows(method: str, sign: int) -> None:
    model = PRESETS["275m"]  # 12 heads
    growth = GrowthConfig(layers=[1, 7], t_start=4, interval=4)
    policy = build_policy(method, growth, model)
    # Head 11 highest; in the second window the order of the heads turns round.
    rising = [[head / 20 for head in range(12)] for _ in range(12)]
    falling = [row[::-1] for row in rising]
    history = grow(policy, [rising] * 7 + [falling] * 9)
    taken = [(step, d.rule, d.phase) for step, _, d in history if d is not None]
    assert taken == [(4, "activate", "growing"), (8, "freeze", "fixed")]

    def passes(step: int) -> dict[int, object]:
        state = history[step - 1][1]
        return {
            layer: (found.heads, found.scale)
            for layer, found in passes_at(
                state, step, entry=policy.entry, interval=4, num_heads=12
            ).items()
        }

    ten = set(range(2, 12)) if sign > 0 else set(range(10))
    # Of the ten, by the entropies of the second window.
    two = {2, 3} if sign > 0 else {8, 9}
    assert passes(3) == {}
    for elapsed in range(4):
        factor = 1 - elapsed / 4
        first = tuple(1.0 if head in ten else factor for head in range(12))
        second = tuple(1.0 if head in two else factor if head in ten else 0.0 for head in range(12))
        assert passes(4 + elapsed) == dict.fromkeys((1, 7), (None, (first,)))
        assert passes(8 + elapsed) == dict.fromkeys((1, 7), (None, (second,)))
    assert passes(12) == dict.fromkeys((1, 7), (tuple(sorted(two)), None))


def test_static_methods_loop_from_the_first_update() -> None:
    model = PRESETS["tiny"]
    growth = GrowthConfig(layers=[4, 2], loops=2, entry="ramp")
    block = build_policy("block_loop", growth, model)
    attention = build_policy("attention_loop", growth, model)
    assert loops_as_json(block.initial_state()) == {
        layer: {"depth": 2, "heads": None} for layer in ("2", "4")
    }
    assert loops_as_json(attention.initial_state()) == {
        layer: {"depth": 2, "heads": [0, 1, 2, 3]} for layer in ("2", "4")
    }
    for policy in (block, attention, build_policy("vanilla", GrowthConfig(), model)):
        assert policy.phase(0, policy.initial_state()) == "fixed"
        assert not any(policy.is_due(step, policy.initial_state()) for step in range(1000))
    # `entry` is about growing: a static loop is whole in its first update.
    state = attention.initial_state()
    first = passes_at(state, 0, entry=attention.entry, interval=250, num_heads=4)
    assert {found.scale for found in first.values()} == {None}
