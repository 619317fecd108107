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


def first_gap(lines: Iterable[Line], initial: State) -> int | None:
    """The step of the first decision that does not continue from what the one before left.

    Lines are missing before it. None in a whole journal. `initial`: Θ at its beginning.
    """
    loops = loops_as_json(initial)
    for line in lines:
        if isinstance(line, DecisionLine):
            if loops_as_json(line.decision.before) != loops:
                return line.decision.step
            loops = loops_as_json(line.decision.after)
    return None


def check_whole(path: Path, header: Header) -> None:
    """Raises: UserError where lines of the journal `path` are missing."""
    initial = build_policy(header.method, header.growth, header.model).initial_state()
    gap = first_gap(read_journal(path, live=True)[1], initial)
    if gap is not None:
        raise UserError(
            path,
            f"step {gap}",
            "starts from loops that no earlier line explains; lines are missing; restore the "
            "journal from a copy",
        )


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
