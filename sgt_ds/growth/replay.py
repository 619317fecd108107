"""What a policy would have done with journalled entropies. Pure: no process group, no model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sgt_ds.errors import UserError
from sgt_ds.growth.decision import OPERATOR, Decision, loops_as_json
from sgt_ds.growth.lines import DecisionLine, Header, Line, read_journal
from sgt_ds.growth.policy import Policy, build_policy
from sgt_ds.growth.state import State
from sgt_ds.growth.statistics import EntropyAverage


class Continuity:
    """Whether a run's journal is whole, seen line by line.

    `initial`: Θ at its beginning. `entropy_every`: as in the run's settings.
    """

    def __init__(self, initial: State, entropy_every: int) -> None:
        self.gap: int | None = None
        """Step of the first line before which others are missing; None in a whole journal."""
        self.state = initial
        """Θ to which the lines so far lead."""
        self.last_step = -1
        """Of the newest line."""
        self._every = entropy_every
        self._awaited: int | None = entropy_every  # None: what a parent measured next is not known

    def see(self, line: Line) -> None:
        """Take in the next line."""
        if isinstance(line, DecisionLine):
            step, after = line.decision.step, line.decision.after
            follows = loops_as_json(line.decision.before) == loops_as_json(self.state)
            whole = follows and (self._awaited is None or step < self._awaited)
            self.state = after
        else:
            step = line.step
            whole = self._awaited is None or line.adopted or step <= self._awaited
            self._awaited = None if line.adopted else (step // self._every + 1) * self._every
        self.last_step = step
        if not whole and self.gap is None:
            self.gap = step


def check_whole(path: Path, header: Header) -> None:
    """Raises: UserError where lines of the journal `path` are missing."""
    gap = continuity(path, header).gap
    if gap is not None:
        raise UserError(
            path,
            f"step {gap}",
            "lines before it are missing, so its growth cannot be derived from what is left; "
            "restore the journal from a copy",
        )


def continuity(path: Path, header: Header) -> Continuity:
    """What the lines of a run's journal tell of what is missing among them.

    Raises: UserError where a line is damaged.
    """
    policy = build_policy(header.method, header.growth, header.model)
    seen = Continuity(policy.initial_state(), header.growth.entropy_every)
    for line in read_journal(path, live=True)[1]:
        seen.see(line)
    return seen


def decisions(
    lines: Iterable[Line], policy: Policy, ema: float, *, obey_operator: bool = False
) -> Iterator[Decision]:
    """Every decision that `policy` takes at the steps that were measured, in order.

    `ema`: weight of the past in the moving average.
    `obey_operator`: stop where the journal notes that a person froze the run's growth.
    """
    state, average = policy.initial_state(), EntropyAverage(ema)
    for line in lines:
        if isinstance(line, DecisionLine):
            if obey_operator and line.decision.rule == "freeze" and line.decision.cause == OPERATOR:
                return
            continue
        entropy = average.update(line)
        if not line.adopted and policy.is_due(line.step, state):
            decision = policy.decide(line.step, entropy, state)
            state = decision.after
            yield decision


def replay(
    lines: Iterable[Line], policy: Policy, ema: float, *, obey_operator: bool = False
) -> Iterator[Decision]:
    """The decisions that changed a loop."""
    for decision in decisions(lines, policy, ema, obey_operator=obey_operator):
        if decision.changes_loops:
            yield decision


def change_as_json(decision: Decision) -> dict[str, Any]:
    """One change as `sgt-ds growth replay` prints it."""
    return {
        "step": decision.step,
        "phase": decision.phase,
        "growing_layer": decision.after.growing_layer,
        "loops": loops_as_json(decision.after),
    }
