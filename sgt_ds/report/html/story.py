"""How a run grew, in words. Plain sentences from the journal's decisions; knows no HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from sgt_ds.growth import NOISE_STANDARD_ERRORS, Decision, DecisionLine, Loop, State
from sgt_ds.report.history import RunHistory

WITHIN_NOISE = "another batch could have led to another choice"


def growth_story(run: RunHistory) -> list[str]:
    """One sentence or two for every event, in order."""
    sentences = [_beginning(run)]
    for stalled, group in groupby(run.decisions, key=lambda line: line.decision.rule == "stall"):
        lines = list(group)
        sentences += [_stalls(lines)] if stalled else [_event(line.decision) for line in lines]
    sentences.append(_now(run))
    return sentences


def change_words(before: State, after: State) -> str:
    """What differs between two states: `layer 4 loops ×1 (heads 1, 3)`; empty where nothing."""
    changes = []
    for layer in sorted({*before.loops, *after.loops}):
        old, new = before.loops.get(layer), after.loops.get(layer)
        if new is None:
            changes.append(f"layer {layer} no longer loops")
        elif old is None or (old.depth, old.heads) != (new.depth, new.heads):
            changes.append(f"layer {layer} loops ×{new.depth} ({heads_words(new)})")
    return "; ".join(changes)


def loops_words(state: State) -> str:
    """All loops of a state."""
    return change_words(State(), state) or "no layer loops"


def loops_now(run: RunHistory) -> str:
    """The loops that the run has by now: nothing fades out once a loop's entry is over."""
    state = run.states[-1][1]
    window = run.header.growth.interval if run.header else 0
    loops = {
        layer: replace(loop, leaving=()) if run.last_step - loop.entered >= window else loop
        for layer, loop in state.loops.items()
    }
    return loops_words(replace(state, loops=loops))


def heads_words(loop: Loop) -> str:
    """Which heads of a layer loop, and which are on their way out."""
    if loop.heads is None:
        return "the whole block"
    words = f"head{'' if len(loop.heads) == 1 else 's'} {_numbers(loop.heads)}"
    return words + (f"; {_numbers(loop.leaving)} fading out" if loop.leaving else "")


def _beginning(run: RunHistory) -> str:
    first = next((line.decision.step for line in run.decisions), None)
    if run.initial.loops:
        return f"From the start: {loops_words(run.initial)}."
    if first is None:
        ends = "so far " if run.steps and run.last_step < run.steps else ""
        return f"Every layer runs once; {ends}growth has decided nothing."
    return f"Steps 0 to {first:,}: every layer runs once."


def _event(decision: Decision) -> str:
    if decision.rule == "freeze":
        return f"Step {decision.step:,}: growth is frozen ({decision.reason})."
    change = change_words(decision.before, decision.after) or "no visible change"
    sentence = f"Step {decision.step:,}: {change}."
    if decision.candidates:
        sentence += f" Candidates, highest entropy first: layers {_numbers(decision.candidates)}."
    return f"{sentence} Why: {decision.cause}.{_margin(decision)}"


def _margin(decision: Decision) -> str:
    margin = decision.margin
    if margin is None:
        return ""
    known = [
        f"{value:.1f} between {what}"
        for value, what in ((margin.layer, "layers"), (margin.head, "heads"))
        if value is not None
    ]
    if not known:
        return ""
    verdict = (
        f"below {NOISE_STANDARD_ERRORS:g}: {WITHIN_NOISE}"
        if margin.within_noise
        else "clear of noise"
    )
    return f" Margin in standard errors: {', '.join(known)} ({verdict})."


def _stalls(lines: Sequence[DecisionLine]) -> str:
    causes = Counter(line.decision.cause for line in lines)
    told = ", ".join(f"{count} × {cause}" for cause, count in causes.items())
    first, last = lines[0].decision.step, lines[-1].decision.step
    if len(lines) == 1:
        return f"Step {first:,}: a window that changed nothing ({lines[0].decision.reason})."
    return f"Steps {first:,} to {last:,}: {len(lines)} windows that changed nothing ({told})."


def _now(run: RunHistory) -> str:
    phase = run.updates[-1].phase if run.updates else ""
    words = {
        "warmup": "still warming up",
        "growing": "growth may continue",
        "fixed": "no further change is possible",
    }
    tail = f"; {words[phase]}" if phase in words else ""
    return f"At step {run.last_step:,}: {loops_now(run)}{tail}."


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
