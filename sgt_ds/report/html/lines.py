"""Plots of lines and points over a running quantity. Knows no run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from sgt_ds.report.html.frame import SIZE, figure, key, table
from sgt_ds.report.html.markup import Markup, joined, short, tag
from sgt_ds.report.html.scale import Axis, axis, significant, thinned

Form = Literal["line", "thin", "wide", "dashed", "dotted", "points"]
# More than a phone or a page of paper has columns for.
MAX_POINTS = 400
MAX_TABLE_ROWS = 60


@dataclass(frozen=True, slots=True)
class Series:
    """One line. `xs` rise; NaN in `ys` breaks it. `colour`: index into the palette."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int
    form: Form = "line"


@dataclass(frozen=True, slots=True)
class Moment:
    """A value of x at which something happened: drawn as an upright line."""

    x: float
    name: str


def line_plot(
    title: str,
    note: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    moments: Sequence[Moment] = (),
    log: bool = False,
    from_zero: bool = False,
    steps: bool = False,
    y_factor: float = 1.0,
) -> Markup | None:
    """The plot; None where no series has a finite point.

    `steps`: a value holds until the next one. `y_factor`: what values are multiplied with.
    """
    series = [_scaled(one, y_factor) for one in series]
    drawn = [one for one in series if any(map(math.isfinite, one.ys))]
    if not drawn:
        return None
    x = axis(x_label, (value for one in drawn for value in one.xs), from_zero=True, scaled=True)
    binned = [(one, *_binned(one, x)) for one in drawn]
    y = axis(
        y_label,
        (value for one in drawn for value in one.ys),
        log=log,
        from_zero=from_zero,
        margin=0.04,
        scaled=True,
    )
    marks = [
        *(_upright(x.place(moment.x)) for moment in moments),
        *(_band(x, y, one.colour, xs, low, high) for one, xs, _, low, high in binned),
        *(_stroke(x, y, one, xs, ys, steps) for one, xs, ys, _, _ in binned),
    ]
    legend = [key(_swatch(one), one.name) for one in drawn]
    legend += [key(_mark_of_moments(), name) for name in dict.fromkeys(m.name for m in moments)]
    if any(len(one.xs) > MAX_POINTS for one in drawn):
        note += " Each point is the mean of several rows; the band around a line is their range."
    return figure(
        title,
        note,
        x=x,
        y_label=y.label,
        y_ticks=y.ticks(),
        marks=marks,
        legend=legend,
        table=_table(drawn, x_label, y_label),
    )


def _scaled(series: Series, factor: float) -> Series:
    if factor == 1.0:
        return series
    ys = [value * factor for value in series.ys]
    return Series(series.name, series.xs, ys, series.colour, series.form)


def _binned(series: Series, x: Axis) -> tuple[list[float], list[float], list[float], list[float]]:
    """x, mean, lowest and highest of each column of the picture; points are left as they are."""
    xs, ys = list(series.xs), list(series.ys)
    if len(xs) <= MAX_POINTS or series.form == "points":
        return xs, ys, [], []
    columns: dict[int, list[int]] = {}
    for index, value in enumerate(xs):
        place = x.place(value)
        if math.isfinite(place):
            columns.setdefault(min(MAX_POINTS - 1, int(place * MAX_POINTS)), []).append(index)
    means, lows, highs, middles = [], [], [], []
    for _, indices in sorted(columns.items()):
        finite = [ys[index] for index in indices if math.isfinite(ys[index])]
        middles.append(math.fsum(xs[index] for index in indices) / len(indices))
        means.append(math.fsum(finite) / len(finite) if finite else math.nan)
        lows.append(min(finite, default=math.nan))
        highs.append(max(finite, default=math.nan))
    return middles, means, lows, highs


def _points(x: Axis, y: Axis, xs: Iterable[float], ys: Iterable[float]) -> list[tuple[str, str]]:
    """Coordinates of the marks; ("", "") where there is none."""
    points = []
    for at, value in zip(xs, ys, strict=True):
        left, up = x.place(at), y.place(value)
        finite = math.isfinite(left) and math.isfinite(up)
        points.append((short(SIZE * left), short(SIZE * (1 - up))) if finite else ("", ""))
    return points


def _stroke(
    x: Axis, y: Axis, series: Series, xs: Sequence[float], ys: Sequence[float], steps: bool
) -> Markup:
    points = _points(x, y, xs, ys)
    if series.form == "points":
        # Hardly any length between round ends: a dot that no stretching deforms.
        path = "".join(f"M{left} {up}h.1" for left, up in points if left)
    else:
        path = _path(points, steps)
    return tag("path", d=path, class_=f"{series.form} s{series.colour}")


def _path(points: Sequence[tuple[str, str]], steps: bool) -> str:
    parts, pen_is_down = [], False
    for index, (left, up) in enumerate(points):
        if not left:
            pen_is_down = False
        elif not pen_is_down:
            alone = index + 1 == len(points) or not points[index + 1][0]
            parts.append(f"M{left} {up}" + ("h.1" if alone else ""))
            pen_is_down = True
        else:
            parts.append(f"H{left}V{up}" if steps else f"L{left} {up}")
    return "".join(parts)


def _band(
    x: Axis,
    y: Axis,
    colour: int,
    xs: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
) -> Markup | None:
    if not low:
        return None
    above = [point for point in _points(x, y, xs, high) if point[0]]
    below = [point for point in _points(x, y, xs, low) if point[0]]
    outline = "L".join(f"{left} {up}" for left, up in [*above, *reversed(below)])
    return tag("path", d=f"M{outline}z", class_=f"band s{colour}")


def _upright(place: float) -> Markup | None:
    if not 0 <= place <= 1:
        return None
    return tag("path", d=f"M{short(SIZE * place)} 0V{SIZE}", class_="moment")


def _swatch(series: Series) -> Markup:
    path = "M14 6h.1" if series.form == "points" else "M2 6H26"
    return tag("path", d=path, class_=f"{series.form} s{series.colour}")


def _mark_of_moments() -> Markup:
    return tag("path", d="M14 0V12", class_="moment")


def _table(drawn: Sequence[Series], x_label: str, y_label: str) -> Markup:
    rows = [
        (one.name, significant(one.xs[index], 5), significant(one.ys[index], 5))
        for one in drawn
        for index in thinned(len(one.xs), MAX_TABLE_ROWS)
    ]
    is_thinned = any(len(one.xs) > MAX_TABLE_ROWS for one in drawn)
    note = "Some rows of many; metrics.jsonl has all." if is_thinned else ""
    return joined([table(("series", x_label, y_label), rows, note=note)])
