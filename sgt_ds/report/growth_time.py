"""Time that growth cost a run: updates that took longer because something in Θ was new."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise

from sgt_ds.growth import Passes, passes_at
from sgt_ds.report.history import RunHistory


@dataclass(frozen=True)
class GrowthPause:
    """The first updates with something new, beyond the usual update from there on."""

    step: int
    """Update after which the state changed; 0 is the start of the run."""
    what: str
    decided: bool
    """Whether a decision changed the loops; else an entry has ended, or the run begins."""
    seconds: float


def growth_pauses(history: RunHistory) -> list[GrowthPause]:
    """The start, and every change of what the layers run, with the seconds that it cost.

    Needs a journal with its header, and metrics of every update (`training.log_every: 1`).
    A change costs what the update that ends in the decision and the first one after it took
    longer than the median of those until the next change: statistics reduced, Θ broadcast, new
    kinds of block compiled. The end of an entry is a change too.
    """
    seconds = {update.step: update.step_seconds for update in history.updates}
    changes = _changes(history)
    bounds = [step for step, _ in changes[1:]] + [max(seconds, default=0) + 1]
    decided = {step for step, _ in history.states[1:]}
    pauses = []
    usual = 0.0
    for (step, what), end in zip(changes, bounds, strict=True):
        # The last update before the next change holds that one's decision.
        steady = [seconds[update] for update in range(step + 2, end) if update in seconds]
        usual = statistics.median(steady) if steady else usual
        new = [seconds[update] for update in (step, step + 1) if update in seconds]
        lost = sum(took - usual for took in new)
        pauses.append(GrowthPause(step, what, step in decided, lost))
    return pauses


def _changes(history: RunHistory) -> list[tuple[int, str]]:
    """Updates after which the layers run something else, and what: the start first."""
    header = history.header
    found: list[tuple[int, str]] = [(0, "first update")]
    if header is None:
        return found
    states = history.states
    before: dict[int, str] = {}
    for (since, state), (until, _) in pairwise([*states, (history.last_step, states[-1][1])]):
        for step in range(since, until):
            passes = passes_at(
                state,
                step,
                entry=header.growth.entry,
                interval=header.growth.interval,
                num_heads=header.model.num_heads,
            )
            kinds = {layer: _kind(run) for layer, run in sorted(passes.items())}
            if kinds != before:
                new = [f"layer {n} {kind}" for n, kind in kinds.items() if before.get(n) != kind]
                found.append((step, "; ".join(new) or "fewer loops"))
            before = kinds
    return found


def _kind(run: Passes) -> str:
    what = "all heads" if run.heads is None else f"{len(run.heads)} heads"
    if run.scope == "block":
        what = "the block"
    return f"×{run.depth} of {what}" + ("" if run.scale is None else ", with factors")
