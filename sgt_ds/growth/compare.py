"""Where and why the growth of two runs diverges, from their journals. Pure but for reading them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgt_ds.growth.decision import OPERATOR, Decision, loops_as_json
from sgt_ds.growth.lines import DecisionLine, Header, Line, read_journal
from sgt_ds.growth.policy import build_policy
from sgt_ds.growth.state import State
from sgt_ds.growth.statistics import Entropy, EntropyAverage, Measurement


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first step at which two runs hold different loops.

    `cause`: fork (one took that step's entropies from its parent and decided nothing), statistics,
    config, statistics and config, operator, or rule (the same settings and entropies, yet another
    outcome: another version decided, or a line was changed).
    """

    step: int
    cause: str
    first: Decision | None
    second: Decision | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """`settings`: what differs in the headers, as key -> (first, second).

    `statistics_step`: the first step whose measured entropies differ, None where none does;
    `largest_difference` there, at `place` (layer, head).
    `divergence`: None where both hold the same loops at every step that both reached.
    `compared_to`: the last step that both journals hold.
    """

    settings: dict[str, tuple[Any, Any]]
    statistics_step: int | None
    largest_difference: float
    place: tuple[int, int] | None
    divergence: Divergence | None
    compared_to: int


@dataclass(slots=True)
class _Run:
    header: Header | None
    measured: dict[int, Measurement] = field(default_factory=dict)
    averaged: dict[int, Entropy] = field(default_factory=dict)
    decisions: dict[int, Decision] = field(default_factory=dict)
    last: int = -1

    @classmethod
    def read(cls, path: Path) -> _Run:
        header, lines = read_journal(path, live=True)
        run = cls(header)
        run._take(lines)
        return run

    def _take(self, lines: Iterable[Line]) -> None:
        average = EntropyAverage(0.0 if self.header is None else self.header.growth.entropy_ema)
        for line in lines:
            if isinstance(line, DecisionLine):
                self.decisions[line.decision.step] = line.decision
                self.last = max(self.last, line.decision.step)
            else:
                self.measured[line.step] = line
                self.averaged[line.step] = average.update(line)
                self.last = max(self.last, line.step)

    def initial_state(self) -> State:
        if self.header is None:
            return State()
        header = self.header
        return build_policy(header.method, header.growth, header.model).initial_state()

    def would_decide(self, step: int, entropy: Entropy | None, state: State) -> State | None:
        """Θ after this run's policy saw `entropy`; None where it can't be told."""
        if self.header is None or entropy is None:
            return None
        policy = build_policy(self.header.method, self.header.growth, self.header.model)
        if len(entropy.mean) != self.header.model.num_layers or not policy.is_due(step, state):
            return state
        return policy.decide(step, entropy, state).after


def compare(first: Path, second: Path) -> Comparison:
    """Compare two runs' journals. Raises: UserError where one can't be read."""
    runs = _Run.read(first), _Run.read(second)
    compared_to = min(run.last for run in runs)
    step, difference, place = _first_difference(*runs)
    settings = _settings(*runs)
    return Comparison(
        settings, step, difference, place, _divergence(*runs, settings, compared_to), compared_to
    )


def _settings(first: _Run, second: _Run) -> dict[str, tuple[Any, Any]]:
    flat = [{} if run.header is None else _flat(run.header.values) for run in (first, second)]
    keys = sorted((flat[0].keys() | flat[1].keys()) - {"config_hash", "version"})
    pairs = {key: (flat[0].get(key), flat[1].get(key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix: values}
    result: dict[str, Any] = {}
    for key, value in values.items():
        result |= _flat(value, f"{prefix}.{key}" if prefix else key)
    return result


def _first_difference(
    first: _Run, second: _Run
) -> tuple[int | None, float, tuple[int, int] | None]:
    for step in sorted(first.measured.keys() & second.measured.keys()):
        one, other = first.measured[step].entropy, second.measured[step].entropy
        if len(one) != len(other) or len(one[0]) != len(other[0]):
            return step, math.inf, None
        # NaN on both sides is no difference; on one side it is the largest.
        differences = [
            (_distance(value, other[layer][head]), (layer, head))
            for layer, heads in enumerate(one)
            for head, value in enumerate(heads)
        ]
        largest, place = max(differences, key=lambda found: found[0])
        if largest > 0:
            return step, largest, place
    return None, 0.0, None


def _distance(one: float, other: float) -> float:
    if math.isnan(one) or math.isnan(other):
        return 0.0 if math.isnan(one) and math.isnan(other) else math.inf
    return abs(one - other)


def _divergence(
    first: _Run, second: _Run, settings: dict[str, tuple[Any, Any]], compared_to: int
) -> Divergence | None:
    states = [first.initial_state(), second.initial_state()]
    if loops_as_json(states[0]) != loops_as_json(states[1]):
        return Divergence(0, "config", None, None)
    for step in sorted(first.decisions.keys() | second.decisions.keys()):
        if step > compared_to:
            return None
        taken = first.decisions.get(step), second.decisions.get(step)
        before = states[0]
        states = [
            state if decision is None else decision.after
            for state, decision in zip(states, taken, strict=True)
        ]
        if loops_as_json(states[0]) != loops_as_json(states[1]):
            cause = _cause(first, second, settings, step, before, states)
            return Divergence(step, cause, *taken)
    return None


def _cause(
    first: _Run,
    second: _Run,
    settings: dict[str, tuple[Any, Any]],
    step: int,
    before: State,
    states: list[State],
) -> str:
    if any(step in run.measured and run.measured[step].adopted for run in (first, second)):
        return "fork"
    for run in (first, second):
        frozen = (taken for at, taken in run.decisions.items() if at <= step)
        if any(taken.rule == "freeze" and taken.cause == OPERATOR for taken in frozen):
            return "operator"
    seen = first.averaged.get(step), second.averaged.get(step)
    same_settings = not any(
        key == "method" or key.startswith(("growth.", "model.")) for key in settings
    )
    if _same(*seen):
        return "rule" if same_settings else "config"
    if same_settings:
        return "statistics"
    # Policies are pure: ask the first one what it makes of the second one's entropies.
    would = first.would_decide(step, seen[1], before)
    if would is not None and loops_as_json(would) == loops_as_json(states[1]):
        return "statistics"
    would = second.would_decide(step, seen[0], before)
    if would is not None and loops_as_json(would) == loops_as_json(states[1]):
        return "config"
    return "statistics and config"


def _same(one: Entropy | None, other: Entropy | None) -> bool:
    """Whether both policies saw the same; NaN equals NaN here."""
    if one is None or other is None:
        return one is other
    return repr(one.mean) == repr(other.mean)
