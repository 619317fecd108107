"""A decision: which rule fired at which step, why, Θ before and after. Pure values, and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sgt_ds.growth.state import State

Phase = Literal["warmup", "growing", "fixed"]
Rule = Literal["activate", "deepen", "freeze", "stall"]

# Fewer standard errors than this between the last taken and the first left out: a coin could
# have decided (two-sided 5%).
NOISE_STANDARD_ERRORS = 2.0


OPERATOR = "operator"
"""Cause of a freeze that a person asked for: no policy would find it from the entropies."""


@dataclass(frozen=True, slots=True)
class Margin:
    """How far a choice stands out from noise, in standard errors of the difference.

    `layer`: between the last layer taken into the candidate set and the first left out.
    `head`: between the last head taken and the next one; the smallest where several layers chose.
    None where nothing was left out, or the standard error is unknown.
    """

    layer: float | None = None
    head: float | None = None

    @property
    def within_noise(self) -> bool:
        """Whether another batch could well have led to another choice."""
        known = [value for value in (self.layer, self.head) if value is not None]
        return any(value < NOISE_STANDARD_ERRORS for value in known)

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"layer": self.layer, "head": self.head, "within_noise": self.within_noise}


@dataclass(frozen=True, slots=True)
class Decision:
    """What happened at one due window.

    `rule`: activate (a layer starts to loop), deepen (the growing layer loops once more),
    freeze (nothing changes from here on), stall (the window changed nothing).
    `reason`: a short cause, a colon, and what lay behind it.
    `candidates`: the candidate set C, highest mean entropy first.
    `ranking`: every eligible layer with its mean entropy, highest first.
    `phase`: as after the decision.
    """

    step: int
    rule: Rule
    reason: str
    candidates: tuple[int, ...]
    margin: Margin | None
    before: State
    after: State
    phase: Phase
    ranking: tuple[tuple[int, float], ...] = ()

    @property
    def cause(self) -> str:
        """The reason's short cause: few different texts, fit to be counted by."""
        return self.reason.partition(":")[0]

    @property
    def changes_loops(self) -> bool:
        """Whether depth or heads of any layer differ before and after."""
        return loops_as_json(self.before) != loops_as_json(self.after)

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON: the fields of a journal's `decision` line, without FLOPs."""
        return {
            "step": self.step,
            "rule": self.rule,
            "reason": self.reason,
            "candidates": list(self.candidates),
            "ranking": [[layer, mean] for layer, mean in self.ranking],
            "margin": None if self.margin is None else self.margin.as_json(),
            "before": _hashed(self.before),
            "after": _hashed(self.after),
            "growing_layer": self.after.growing_layer,
            "loops": loops_as_json(self.after),
            "phase": self.phase,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Decision:
        """The decision that `as_json` described. Raises: KeyError, TypeError, ValueError."""
        rule, phase, margin = values["rule"], values["phase"], values["margin"]
        if rule not in get_args(Rule):
            raise ValueError(f"rule {rule!r} is not one of {', '.join(get_args(Rule))}")
        if phase not in get_args(Phase):
            raise ValueError(f"phase {phase!r} is not one of {', '.join(get_args(Phase))}")
        after = _checked(values["after"])
        # Written for readers that want no state; one that was edited must not pass for the other.
        for key, held in (("loops", loops_as_json(after)), ("growing_layer", after.growing_layer)):
            if values.get(key, held) != held:
                raise ValueError(f"its {key} {values[key]} should be {held}, as in `after`")
        return cls(
            step=int(values["step"]),
            rule=rule,
            reason=str(values["reason"]),
            candidates=tuple(int(layer) for layer in values["candidates"]),
            margin=None if margin is None else Margin(margin["layer"], margin["head"]),
            before=_checked(values["before"]),
            after=after,
            phase=phase,
            ranking=tuple((int(layer), float(mean)) for layer, mean in values.get("ranking", ())),
        )


def stall(
    step: int,
    reason: str,
    state: State,
    phase: Phase,
    candidates: tuple[int, ...] = (),
    margin: Margin | None = None,
    ranking: tuple[tuple[int, float], ...] = (),
) -> Decision:
    """A due window that changes nothing."""
    return Decision(step, "stall", reason, candidates, margin, state, state, phase, ranking)


def freeze(step: int, reason: str, state: State) -> Decision:
    """From here on nothing is decided; an entry under way still ends."""
    return Decision(step, "freeze", reason, (), None, state, state, "fixed")


def loops_as_json(state: State) -> dict[str, dict[str, Any]]:
    """Depth and ascending heads of each looping layer: the short form that `replay` prints."""
    return {
        str(layer): {
            "depth": loop.depth,
            "heads": None if loop.heads is None else sorted(loop.heads),
        }
        for layer, loop in state.loops.items()
    }


def _hashed(state: State) -> dict[str, Any]:
    return {"hash": state.digest(), **state.as_json()}


def _checked(values: Mapping[str, Any]) -> State:
    state = State.from_json(values)
    if values["hash"] != state.digest():
        raise ValueError("a state does not match its hash")
    return state
