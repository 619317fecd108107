"""Two models on the same items: differences with their bootstrap intervals, McNemar's exact test.

Pairing takes out what the items have in common: two models that differ by a point can differ for
certain where each by itself has a standard error of two. Knows items alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sgt_ds.errors import UserError
from sgt_ds.evaluation.items import Metric
from sgt_ds.evaluation.results import ItemResult
from sgt_ds.evaluation.tasks import TASKS
from sgt_ds.progress import counted

RESAMPLES = 10_000
CONFIDENCE = 0.95
# Indices drawn at a time: 64 MiB.
_DRAWN = 1 << 23

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models on one task, `task` "mean" for the unweighted mean over all tasks."""

    task: str
    rule: str
    metric: str
    items: int
    first: float
    second: float
    difference: float
    """Second minus first."""
    low: float
    high: float
    """Ends of the bootstrap's percentile interval of the difference, 95%."""
    only_first: int | None
    """Items that the first alone has right; None for bits per byte and for the mean."""
    only_second: int | None
    p_value: float | None
    """McNemar's exact two-sided test of those two counts."""

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def compare(
    first: tuple[Path, Sequence[ItemResult]],
    second: tuple[Path, Sequence[ItemResult]],
    *,
    metric: Metric | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Comparison]:
    """Compare two models on the tasks that both answered, and on the mean of them.

    `metric`: None takes each task's own, as its rule reports. The mean is resampled within tasks,
    each task by itself. Raises: UserError where no task is shared, or their items differ.
    """
    of_first, of_second = _by_task(first[1]), _by_task(second[1])
    shared = [key for key in of_first if key in of_second]
    if not shared:
        message = (
            f"has no task and rule in common with {first[0]}; score both models with the same "
            "--tasks and --rule"
        )
        raise UserError(second[0], None, message)
    generator = np.random.default_rng(seed)
    rows: list[Comparison] = []
    spreads: dict[str, list[tuple[float, float, Floats]]] = {}
    for key in shared:
        ours, theirs = of_first[key], of_second[key]
        _check_same_items(first[0], second[0], key, ours, theirs)
        own = metric or (TASKS[key[0]].metric[ours[0].rule] if key[0] in TASKS else "acc")
        a = np.array([item.score(own) for item in ours])
        b = np.array([item.score(own) for item in theirs])
        means = bootstrap_means(b - a, resamples, generator)
        rows.append(_row(*key, own, a, b, means))
        spreads.setdefault(key[1], []).append((float(a.mean()), float(b.mean()), means))
    for rule, several in spreads.items():
        if len(several) > 1:
            rows.append(_mean_row(rule, metric or "own", several, rows))
    return rows


def bootstrap_means(differences: Floats, resamples: int, generator: np.random.Generator) -> Floats:
    """Means of `resamples` samples, drawn with replacement from the differences (n,).

    Where they take few values (right and wrong give −1, 0 and 1) the counts of a sample are drawn
    at once, from their multinomial distribution: the same thing, in no time.
    """
    values, counts = np.unique(differences, return_counts=True)
    size = len(differences)
    if len(values) <= 3:
        drawn = generator.multinomial(size, counts / size, size=resamples)
        return drawn @ values / size
    means = np.empty(resamples)
    step = max(1, _DRAWN // size)
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        indices = generator.integers(0, size, (rows, size), dtype=np.int32)
        means[start : start + rows] = differences[indices].mean(axis=1)
    return means


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided p-value, exact: how likely so uneven a split is where either is as likely."""
    total, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(total, count) for count in range(fewer + 1))
    # Integers to the end: 2^total has no float beyond 1,023 items.
    return min(1.0, 2 * tail / (1 << total))


def _row(task: str, rule: str, metric: Metric, a: Floats, b: Floats, means: Floats) -> Comparison:
    low, high = _interval(means)
    split: tuple[int, int] | None = None
    if metric != "bpb":
        split = int(((a == 1) & (b == 0)).sum()), int(((a == 0) & (b == 1)).sum())
    return Comparison(
        task=task,
        rule=rule,
        metric=metric,
        items=len(a),
        first=float(a.mean()),
        second=float(b.mean()),
        difference=float((b - a).mean()),
        low=low,
        high=high,
        only_first=split and split[0],
        only_second=split and split[1],
        p_value=split and mcnemar(*split),
    )


def _mean_row(
    rule: str, metric: str, several: list[tuple[float, float, Floats]], rows: list[Comparison]
) -> Comparison:
    first, second = (float(np.mean([each[place] for each in several])) for place in (0, 1))
    low, high = _interval(np.mean([means for _, _, means in several], axis=0))
    return Comparison(
        task="mean",
        rule=rule,
        metric=metric,
        items=sum(row.items for row in rows if row.rule == rule),
        first=first,
        second=second,
        difference=second - first,
        low=low,
        high=high,
        only_first=None,
        only_second=None,
        p_value=None,
    )


def _interval(means: Floats) -> tuple[float, float]:
    rest = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [rest, 1 - rest])
    return float(low), float(high)


def _by_task(items: Sequence[ItemResult]) -> dict[tuple[str, str], list[ItemResult]]:
    found: dict[tuple[str, str], list[ItemResult]] = {}
    for item in items:
        found.setdefault((item.task, item.rule), []).append(item)
    return {key: sorted(each, key=lambda item: item.index) for key, each in found.items()}


def _check_same_items(
    first: Path,
    second: Path,
    key: tuple[str, str],
    ours: Sequence[ItemResult],
    theirs: Sequence[ItemResult],
) -> None:
    if len(ours) != len(theirs):
        raise UserError(
            second,
            key[0],
            f"has {counted(len(theirs), 'item')} and {first} {len(ours)}; score the same ones",
        )
    for a, b in zip(ours, theirs, strict=True):
        if (a.index, a.sha256) != (b.index, b.sha256):
            raise UserError(
                second, key[0], f"item {b.id} is not item {a.id} of {first}; score the same data"
            )
