"""Axes: positions of values and ticks, and how numbers are written. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values. `label` names quantity and unit; ticks are values over `divisor`.

    `whole`: of numbers between which nothing lies, as steps.
    """

    label: str
    low: float
    high: float
    log: bool = False
    divisor: float = 1.0
    whole: bool = False

    def place(self, value: float) -> float:
        """Where a value lies, 0 at the low end and 1 at the high one; NaN where nowhere."""
        if not math.isfinite(value) or (self.log and value <= 0):
            return math.nan
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return (at - low) / (high - low)

    def ticks(self, count: int = 5) -> list[tuple[float, str]]:
        """Places and texts of about `count` round values."""
        if self.log:
            values = _decades(self.low, self.high, count)
            return [(self.place(value), _number(value)) for value in values]
        low, high = self.low / self.divisor, self.high / self.divisor
        step = _round_step((high - low) / count)
        if self.whole:
            step = max(1.0, math.floor(step) if step < 10 else step)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        digits = max(0, -int(Decimal(f"{step:.6g}").normalize().as_tuple().exponent))
        return [
            (self.place(index * step * self.divisor), f"{index * step:,.{digits}f}")
            for index in range(first, last + 1)
        ]


def axis(
    label: str,
    values: Iterable[float],
    *,
    log: bool = False,
    from_zero: bool = False,
    margin: float = 0.0,
    scaled: bool = False,
) -> Axis:
    """An axis around the finite values. `margin`: share of the range left free on either side.

    `scaled`: large or small values are written as multiples of a power of ten, named in the label.
    """
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    low, high = min(finite, default=0.1 if log else 0.0), max(finite, default=1.0)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    if log:
        ratio = (high / low) ** margin if high > low else 2.0
        return Axis(label, low / ratio, high * ratio, log=True)
    if high <= low:
        room = abs(high) * 0.1 or 1.0
        low, high = (low if from_zero else low - room), high + room
    room = (high - low) * margin
    low, high = (low if from_zero and low == 0 else low - room), high + room
    power = math.floor(math.log10(max(abs(low), abs(high))))
    exponent = power if power < 0 else 3 * (power // 3)
    if not scaled or -3 < exponent < 6:
        whole = all(float(value).is_integer() for value in finite)
        return Axis(label, low, high, whole=whole)
    return Axis(f"{label} (×10{_superscript(exponent)})", low, high, divisor=10.0**exponent)


def significant(value: float, digits: int = 4) -> str:
    """A number for a table: plain where it is short, with a power of ten where it is not."""
    if not math.isfinite(value):
        return "–"
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        text = f"{value:,.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"
        return text if "e" not in text else f"{value:,.0f}"
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa}×10{_superscript(int(exponent))}"


def percent(ratio: float, digits: int = 2, *, signed: bool = False) -> str:
    """A ratio as a percentage."""
    if not math.isfinite(ratio):
        return "–"
    return f"{100 * ratio:{'+' if signed else ''}.{digits}f} %"


def thinned(count: int, most: int) -> Sequence[int]:
    """At most `most` indices of `count`, evenly spread, the first and the last among them."""
    if count <= most:
        return range(count)
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.75)


def _decades(low: float, high: float, count: int) -> list[float]:
    """Powers of ten in range; with 2 and 5 between them, or 1 to 9, where those are few."""
    for factors in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        values = [
            factor * 10.0**power
            for power in range(first, last + 1)
            for factor in factors
            if low <= factor * 10.0**power <= high
        ]
        if len(values) >= 3:
            break
    return [values[index] for index in thinned(len(values), count + 2)]


def _number(value: float) -> str:
    return f"{value:g}" if 1e-3 <= value < 1e5 else significant(value, 1)


def _superscript(exponent: int) -> str:
    return str(exponent).translate(_SUPERSCRIPTS)
