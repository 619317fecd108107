"""Plots of growth: loop depths and entropies over time, current heads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sgt_ds.growth import Loop, State
from sgt_ds.report.history import RunHistory
from sgt_ds.report.html.heat import Event, Outline, Span, heat_map, timeline
from sgt_ds.report.html.markup import Markup
from sgt_ds.report.html.scale import Axis, axis, significant, thinned
from sgt_ds.report.html.story import change_words

MAX_COLUMNS = 96
"""Columns of a heat map over time: as many as a phone has room for."""
MAX_HEAD_LABELS = 16


def depth_timeline(run: RunHistory, _: Sequence[RunHistory]) -> Markup | None:
    """When which layer looped how deep; None where the run tells of no layer."""
    layers = _layers(run)
    if not layers:
        return None
    end = max(run.last_step, 1)
    states = run.states
    spans = []
    for layer in range(layers):
        spans += _spans_of(layer, states, end)
    events = [Event(line.decision.step, line.decision.rule) for line in run.decisions]
    lines = [
        (
            f"{line.decision.step:,}",
            line.decision.rule,
            change_words(line.decision.before, line.decision.after) or line.decision.reason,
            significant(line.flops, 4),
        )
        for line in run.decisions
    ]
    return timeline(
        "Loop depth",
        "Each bar is a layer that is applied again; a thin line is one that runs once.",
        layers,
        spans,
        events,
        x=_steps_axis(run),
        head=("step", "decision", "what changed, or why nothing did", "FLOPs spent"),
        lines=lines or [("0", "–", "no decision in this run so far", "0")],
    )


def entropy_map(run: RunHistory, runs: Sequence[RunHistory]) -> Markup | None:
    """Layer × time, loops outlined; None before the first measurement.

    `runs`: those it stands beside; one colour means the same in all of them.
    """
    return _map_over_time(
        run,
        run.entropies.means,
        _range(layer for each in runs for layer in _binned(each, each.entropies.means)),
        "Entropy by layer over time",
        "Attention entropy of a layer, mean over its heads; 1 attends to all positions equally. A "
        "frame marks the time during which a layer loops; where one ends and the next begins, its "
        "depth grows by one.",
        "normalized entropy, 0–1",
    )


def variance_map(run: RunHistory, runs: Sequence[RunHistory]) -> Markup | None:
    """Layer × time of the variance between heads; None before the first measurement."""
    return _map_over_time(
        run,
        run.entropies.variances,
        _range(layer for each in runs for layer in _binned(each, each.entropies.variances)),
        "Differences between heads over time",
        "Variance of the entropies of a layer's heads: how far they have specialised.",
        "variance of the entropy",
    )


def head_map(run: RunHistory, runs: Sequence[RunHistory]) -> Markup | None:
    """Current layer × head map, looped heads outlined; None before the first measurement."""
    heads = run.entropies.heads
    if not heads:
        return None
    width = len(heads[0])
    state = run.states[-1][1]
    outlines = [
        Outline(layer, head, head + 1, f"×{loop.depth}")
        for layer, loop in state.loops.items()
        for head in _heads_of(loop, width)
    ]
    shown = thinned(width, MAX_HEAD_LABELS)
    return heat_map(
        "Current heads",
        f"Moving average at step {run.entropies.steps[-1]:,}, from which growth decides. "
        "Framed heads loop.",
        heads,
        x=Axis("head", 0, width),
        edges=range(width + 1),
        unit="normalized entropy, 0–1",
        column_names=[f"head {head}" for head in range(width)],
        outlines=outlines,
        outline_name="looped head, and how many times",
        x_ticks=[((head + 0.5) / width, str(head)) for head in shown],
        value_range=_range(heads for each in runs for heads in each.entropies.heads),
    )


def _map_over_time(
    run: RunHistory,
    values: Sequence[Sequence[float]],
    value_range: tuple[float, float],
    title: str,
    note: str,
    unit: str,
) -> Markup | None:
    steps = run.entropies.steps
    if not steps:
        return None
    edges, _ = _columns(steps)
    cells = _binned(run, values)
    end = max(run.last_step, 1)
    outlines = [
        Outline(span.row, span.left, span.right)
        for layer in range(len(values))
        for span in _spans_of(layer, run.states, end)
        if span.depth
    ]
    return heat_map(
        title,
        note,
        cells,
        x=_steps_axis(run),
        edges=edges,
        unit=unit,
        column_names=[f"to step {math.floor(edge):,}" for edge in edges[1:]],
        outlines=outlines,
        outline_name="layer loops",
        value_range=value_range,
    )


def _binned(run: RunHistory, values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Means of each column [layer][column]; empty before the first measurement."""
    if not run.entropies.steps:
        return []
    _, columns = _columns(run.entropies.steps)
    return [[_mean(layer, column) for column in columns] for layer in values]


def _range(rows: Iterable[Sequence[float]]) -> tuple[float, float]:
    """Lowest and highest finite value."""
    finite = [value for row in rows for value in row if math.isfinite(value)]
    return min(finite, default=0.0), max(finite, default=1.0)


def _columns(steps: Sequence[int]) -> tuple[list[float], list[range]]:
    """Edges of at most so many equal columns, and the measurements that fall into each."""
    first, last = steps[0] - 1, steps[-1]
    count = min(MAX_COLUMNS, max(1, len(steps)))
    edges = [first + (last - first) * index / count for index in range(count + 1)]
    columns, start = [], 0
    for edge in edges[1:]:
        stop = start
        while stop < len(steps) and steps[stop] <= edge + 1e-9:
            stop += 1
        columns.append(range(start, stop))
        start = stop
    return edges, columns


def _mean(values: Sequence[float], indices: Sequence[int]) -> float:
    finite = [values[index] for index in indices if math.isfinite(values[index])]
    return math.fsum(finite) / len(finite) if finite else math.nan


def _steps_axis(run: RunHistory) -> Axis:
    return axis("step", [max(run.last_step, 1)], from_zero=True, scaled=True)


def _layers(run: RunHistory) -> int:
    if run.header is not None:
        return run.header.model.num_layers
    return len(run.entropies.means)


def _spans_of(layer: int, states: Sequence[tuple[int, State]], end: int) -> list[Span]:
    """Stretches of one layer in which its loop is the same, in order."""
    spans: list[Span] = []
    bounds = [step for step, _ in states[1:]] + [end]
    for (start, state), stop in zip(states, bounds, strict=True):
        loop = state.loops.get(layer)
        depth = loop.depth if loop else 0
        if spans and spans[-1].depth == depth:
            spans[-1] = Span(layer, spans[-1].left, max(stop, start), depth, spans[-1].text)
        elif stop > start or not spans:
            text = f"×{depth}" if depth else ""
            spans.append(Span(layer, start, stop, depth, text))
    return spans


def _heads_of(loop: Loop, width: int) -> Sequence[int]:
    return range(width) if loop.heads is None else loop.heads
