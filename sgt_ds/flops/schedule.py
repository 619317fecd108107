"""When a run's loops would start: the real policies, on synthetic or journalled entropies.

Knows no FLOPs and no clock but the count of updates. The layers and heads that a made-up schedule
names are examples: nobody knows before training which ones will be chosen, and FLOPs and memory
do not depend on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sgt_ds.config import GrowthConfig, ModelConfig
from sgt_ds.growth import (
    Decision,
    Entropy,
    Line,
    Measurement,
    Passes,
    Policy,
    State,
    build_policy,
    check_shape,
    decisions,
    passes_at,
    read_journal,
)

Assumption = Literal["earliest", "latest", "lower", "journal"]

Allowed = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class Segment:
    """Updates that all run the same passes: those after `start` applied ones, up to `end`."""

    start: int
    end: int
    passes: dict[int, Passes]


@dataclass(frozen=True)
class Schedule:
    """Θ at every step of a run of `steps` updates, as `assumption` has it."""

    assumption: Assumption
    steps: int
    initial: State
    changes: tuple[Decision, ...]
    """The decisions that change a loop, in order."""

    def segments(self, policy: Policy, interval: int, num_heads: int) -> Iterator[Segment]:
        """The run cut where the passes change: at decisions, and where an entry window ends."""
        states = [(0, self.initial), *((change.step, change.after) for change in self.changes)]
        edges = {0, self.steps}
        for step, state in states:
            edges.add(step)
            edges.update(loop.entered + interval for loop in state.loops.values())
        inside = sorted(edge for edge in edges if 0 <= edge <= self.steps)
        for start, end in itertools.pairwise(inside):
            state = next(state for step, state in reversed(states) if step <= start)
            passes = passes_at(
                state, start, entry=policy.entry, interval=interval, num_heads=num_heads
            )
            yield Segment(start, end, passes)


def earliest(method: str, growth: GrowthConfig, model: ModelConfig, steps: int) -> Schedule:
    """Every window activates or deepens a layer: the most FLOPs that the method can spend."""
    return _walk("earliest", method, growth, model, steps, lambda step: True)


def latest(method: str, growth: GrowthConfig, model: ModelConfig, steps: int) -> Schedule:
    """Nothing happens until the last moment at which all growth still fits in the run.

    Where it does not fit even from the first window on, the earliest schedule.
    """
    needed = earliest(method, growth, model, steps)
    # A change at the very last step acts in no update: it is none of the changes that must fit.
    acting = sum(change.step < steps for change in needed.changes)
    windows = [step for step in _windows(method, growth, model, steps) if step < steps]
    idle = frozenset(windows[: max(0, len(windows) - acting)])
    return _walk("latest", method, growth, model, steps, lambda step: step not in idle)


def lower(method: str, growth: GrowthConfig, model: ModelConfig, steps: int) -> Schedule:
    """The first layer starts to loop at the first window, and nothing changes ever after."""
    first = earliest(method, growth, model, steps).changes[:1]
    until = first[0].step if first else 0
    return _walk("lower", method, growth, model, steps, lambda step: step <= until)


def from_journal(
    path: Path, method: str, growth: GrowthConfig, model: ModelConfig, steps: int
) -> tuple[Schedule, int]:
    """What the policy did, or would have done, with a journal's entropies; and its last step.

    After the journal's end nothing changes any more, nor after a person froze it; under other
    settings than the journal's own such a freeze says nothing.
    Raises: UserError where the journal can't be read or is of another shape.
    """
    policy, reached = build_policy(method, growth, model), 0
    header, lines = read_journal(path, live=True)
    own = header is not None and (header.method, header.growth) == (method, growth)

    def counted() -> Iterator[Line]:
        nonlocal reached
        for line in lines:
            if not isinstance(line, Measurement):
                yield line
                continue
            if line.step > steps:
                continue
            check_shape(path, line, model)
            reached = line.step
            yield line

    found = decisions(counted(), policy, growth.entropy_ema, obey_operator=own)
    changes = tuple(decision for decision in found if decision.changes_loops)
    return Schedule("journal", steps, policy.initial_state(), changes), reached


def passes_to_come(
    method: str, growth: GrowthConfig, model: ModelConfig, steps: int
) -> list[dict[int, Passes]]:
    """What layers run in the parts of a run, in order, where growth comes at every window; then
    where it stops after the first one: a layer that is left for another one is not deepened.
    """
    policy = build_policy(method, growth, model)
    return [
        segment.passes
        for assumed in (earliest, lower)
        for segment in assumed(method, growth, model, steps).segments(
            policy, growth.interval, model.num_heads
        )
    ]


def finish_step(method: str, growth: GrowthConfig, model: ModelConfig) -> int | None:
    """Step of the last change if the run were as long as it takes and never frozen; 0 if static.

    None where even that does not finish: windows never fall on a measured step.
    """
    endless = growth.model_copy(update={"freeze_at": None})
    policy = build_policy(method, endless, model)
    # Windows and measured steps meet at least once in this many updates, if they ever do.
    period = math.lcm(growth.interval, growth.entropy_every)
    wanted = model.num_layers * growth.k_max + len(growth.stages)
    schedule = earliest(method, endless, model, growth.t_start + period * (wanted + 1))
    final = schedule.changes[-1].after if schedule.changes else schedule.initial
    if policy.phase(schedule.steps, final) != "fixed":
        return None
    return schedule.changes[-1].step if schedule.changes else 0


def _walk(
    assumption: Assumption,
    method: str,
    growth: GrowthConfig,
    model: ModelConfig,
    steps: int,
    allowed: Allowed,
) -> Schedule:
    """Let the policy decide at every due step; where not `allowed`, it gets no entropies."""
    policy = build_policy(method, growth, model)
    state = initial = policy.initial_state()
    entropy = _favourable(growth, model)
    changes: list[Decision] = []
    for step in _measured(growth, steps):
        if not policy.is_due(step, state):
            continue
        decision = policy.decide(step, entropy if allowed(step) else None, state)
        state = decision.after
        if decision.changes_loops:
            changes.append(decision)
        if decision.phase == "fixed":
            break
    return Schedule(assumption, steps, initial, tuple(changes))


def _windows(method: str, growth: GrowthConfig, model: ModelConfig, steps: int) -> list[int]:
    """Due, measured steps of a policy that never gets to change anything."""
    policy = build_policy(method, growth, model)
    state = policy.initial_state()
    return [
        step
        for step in _measured(growth, steps)
        if policy.is_due(step, state) and (growth.freeze_at is None or step < growth.freeze_at)
    ]


def _measured(growth: GrowthConfig, steps: int) -> range:
    """Measured steps from t_start on: a window that falls on none of them changes nothing."""
    first = -(-max(1, growth.t_start) // growth.entropy_every) * growth.entropy_every
    return range(first, steps + 1, growth.entropy_every)


def _favourable(growth: GrowthConfig, model: ModelConfig) -> Entropy:
    """Entropies under which the same layers stay candidates and the next in order is among them.

    Deep to shallow: the deeper, the higher; shallow to deep: mirrored. Head 0 is highest.
    """
    layers, heads = model.num_layers, model.num_heads
    rows = []
    for layer in range(layers):
        rank = layer if growth.direction == "d2s" else layers - 1 - layer
        base = (rank + 1) / (layers + 2)
        rows.append(tuple(base + (heads - head) / (heads * (layers + 3)) for head in range(heads)))
    unknown = tuple((math.nan,) * heads for _ in range(layers))
    return Entropy(tuple(rows), unknown)
