"""Entropy statistics of one update and their moving average, as numbers for the journal.

Knows no model, no process group and no policy. What is decided from is exactly what is written
down: shortest float32 text, NaN (`null` in JSON) where not finite. Paper, eq. 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = tuple[tuple[float, ...], ...]
"""One number a head, [layer][head]; NaN where there is none."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one update measured, as journalled.

    `step`: the count of applied updates that this one made.
    `entropy`: normalized entropy per head, 0–1, mean over the sequences of the global batch.
    `stderr`: standard error of that mean over the sequences; NaN with fewer than two.
    `sequences`: how many sequences were counted; 0 where unknown.
    `adopted`: of the run that the journal's own forks from, which it did not decide from.
    """

    step: int
    entropy: Rows
    stderr: Rows
    sequences: int
    adopted: bool = False

    def first_not_finite(self) -> tuple[int, int] | None:
        """The first (layer, head) without a finite entropy, or None."""
        return _first_not_finite(self.entropy)


@dataclass(frozen=True, slots=True)
class Entropy:
    """What a policy decides from: the moving average of the measurements.

    `mean`: per head, 0–1; NaN where the newest measurement was not finite.
    `stderr`: standard error of `mean`, from those of the measurements; NaN where unknown.
    `sequences`: of the newest measurement; 0 where unknown.
    """

    mean: Rows
    stderr: Rows
    sequences: int = 0

    def layer_means(self) -> tuple[float, ...]:
        """Mean over the heads of each layer, by an exact sum: no order of summing breaks a tie."""
        return tuple(math.fsum(heads) / len(heads) for heads in self.mean)

    def layer_stderr(self) -> tuple[float, ...]:
        """Upper bound of each layer mean's standard error: the heads see the same sequences."""
        return tuple(math.fsum(heads) / len(heads) for heads in self.stderr)

    def first_not_finite(self) -> tuple[int, int] | None:
        """The first (layer, head) without a finite mean, or None."""
        return _first_not_finite(self.mean)

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "mean": rows_to_json(self.mean),
            "stderr": rows_to_json(self.stderr),
            "sequences": self.sequences,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Entropy:
        """The entropy that `as_json` described. Raises: KeyError, TypeError, ValueError."""
        mean, stderr = rows_from_json(values["mean"]), rows_from_json(values["stderr"])
        return cls(
            tuple(tuple(heads) for heads in mean or ()),
            tuple(tuple(heads) for heads in stderr or ()),
            int(values["sequences"]),
        )


def measurement_of(step: int, sums: npt.NDArray[np.float64]) -> Measurement:
    """The statistic of one update from its totals over the whole global batch.

    `sums`: float64 (layers, heads, 3) = sum, sum of squares, count. A head whose totals are not
    finite or whose count is 0 gets NaN.
    """
    total, squares, count = sums[..., 0], sums[..., 1], sums[..., 2]
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = total / count
        variance = np.maximum(squares - count * mean * mean, 0.0) / (count - 1)
        stderr = np.where(count > 1, np.sqrt(variance / count), np.nan)
    finite_counts = count[np.isfinite(count)]
    return Measurement(
        step=step,
        entropy=tuple(tuple(as_journalled(value) for value in heads) for heads in mean),
        stderr=tuple(tuple(_three_digits(value) for value in heads) for heads in stderr),
        sequences=int(finite_counts.max()) if finite_counts.size else 0,
    )


def as_journalled(value: float) -> float:
    """`value` clamped to [0, 1] as a journal keeps it: what its shortest float32 text reads as."""
    if not math.isfinite(value):
        return math.nan
    return float(str(np.float32(min(1.0, max(0.0, value)))))


class EntropyAverage:
    """Exponential moving average over measurements: ē ← ema·ē + (1 − ema)·e, from the first on.

    A head whose measurement is not finite has no value at that step, and its average continues
    from the last finite one: a single NaN must not blind every later window.
    """

    def __init__(self, ema: float) -> None:
        self.ema = ema
        self._mean: list[list[float]] | None = None
        self._variance: list[list[float]] | None = None

    def update(self, measurement: Measurement) -> Entropy:
        """Take one measurement in and give the average after it."""
        if self._mean is None or self._variance is None:
            blank = [[math.nan] * len(heads) for heads in measurement.entropy]
            self._mean, self._variance = blank, [list(heads) for heads in blank]
        past, new = self.ema, 1.0 - self.ema
        variance = [[error * error for error in heads] for heads in measurement.stderr]
        current_mean = _blend(self._mean, measurement.entropy, past, new)
        # Batches are independent: variances add with the squared weights.
        current_variance = _blend(self._variance, variance, past * past, new * new)
        return Entropy(
            mean=current_mean,
            stderr=tuple(tuple(math.sqrt(value) for value in heads) for heads in current_variance),
            sequences=measurement.sequences,
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"mean": rows_to_json(self._mean), "variance": rows_to_json(self._variance)}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._mean = rows_from_json(values["mean"])
        self._variance = rows_from_json(values["variance"])


def averaged(measurements: Iterable[Measurement], ema: float) -> dict[str, Any]:
    """What a controller that averages so keeps of these measurements; see its `state_dict`."""
    average, entropy, step = EntropyAverage(ema), None, -1
    for measurement in measurements:
        entropy, step = average.update(measurement), measurement.step
    return {
        "average": average.state_dict(),
        "measured_step": step,
        "latest": None if entropy is None else entropy.as_json(),
    }


def rows_to_json(rows: Sequence[Sequence[float]] | None) -> list[list[float | None]] | None:
    """`null` where a number is not finite: JSON has no NaN."""
    if rows is None:
        return None
    return [[value if math.isfinite(value) else None for value in heads] for heads in rows]


def rows_from_json(rows: Sequence[Sequence[float | None]] | None) -> list[list[float]] | None:
    """The inverse of `rows_to_json`."""
    if rows is None:
        return None
    return [[math.nan if value is None else float(value) for value in heads] for heads in rows]


def _blend(
    average: list[list[float]], values: Sequence[Sequence[float]], past: float, new: float
) -> Rows:
    """Move `average` in place; return it with NaN where the newest value is not finite."""
    current = []
    for kept, heads in zip(average, values, strict=True):
        row = []
        for head, value in enumerate(heads):
            if math.isfinite(value):
                before = kept[head]
                kept[head] = past * before + new * value if math.isfinite(before) else value
                row.append(kept[head])
            else:
                row.append(math.nan)
        current.append(tuple(row))
    return tuple(current)


def _first_not_finite(rows: Rows) -> tuple[int, int] | None:
    for layer, heads in enumerate(rows):
        for head, value in enumerate(heads):
            if not math.isfinite(value):
                return layer, head
    return None


def _three_digits(value: float) -> float:
    return float(f"{value:.2e}")
