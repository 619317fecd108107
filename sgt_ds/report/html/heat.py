"""Heat maps, and the timeline of loop depths. Layers count from the bottom up. Knows no run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sgt_ds.report.html.frame import SIZE, figure, key, note_at, table
from sgt_ds.report.html.markup import Markup, joined, short, tag
from sgt_ds.report.html.palette import SHADES, shade, shade_colour
from sgt_ds.report.html.scale import Axis, significant, thinned

MAX_ROW_LABELS = 18


@dataclass(frozen=True, slots=True)
class Outline:
    """A frame around cells of one row, from `left` to `right` in the units of the x axis."""

    row: int
    left: float
    right: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of a timeline's row. `depth` 0 is drawn as a thin line."""

    row: int
    left: float
    right: float
    depth: int
    text: str


@dataclass(frozen=True, slots=True)
class Event:
    """A decision under a timeline."""

    x: float
    kind: Literal["activate", "deepen", "freeze", "stall"]


def heat_map(
    title: str,
    note: str,
    cells: Sequence[Sequence[float]],
    *,
    x: Axis,
    edges: Sequence[float],
    unit: str,
    column_names: Sequence[str],
    outlines: Sequence[Outline] = (),
    outline_name: str = "loops",
    value_range: tuple[float, float],
    x_ticks: Sequence[tuple[float, str]] | None = None,
) -> Markup | None:
    """Cells [row][column] by colour; None where none is finite.

    `edges`: where columns begin and the last one ends, on the x axis. `unit`: what the colour says.
    `value_range`: values of the lowest and the highest shade.
    """
    finite = [value for row in cells for value in row if math.isfinite(value)]
    if not finite:
        return None
    low, high = value_range
    by_shade: dict[int, list[str]] = {}
    height = SIZE / len(cells)
    for row, values in enumerate(cells):
        top = SIZE - height * (row + 1)
        for column, value in enumerate(values):
            if not math.isfinite(value):
                continue
            left, right = (SIZE * x.place(edge) for edge in edges[column : column + 2])
            place = (value - low) / (high - low) if high > low else 0.5
            by_shade.setdefault(shade(place), []).append(
                f"M{short(left)} {short(top)}h{short(right - left + 0.4)}v{short(height + 0.4)}"
                f"H{short(left)}z"
            )
    marks = [
        tag("path", d="".join(paths), class_="cell", fill=shade_colour(index))
        for index, paths in sorted(by_shade.items())
    ]
    legend = [_colour_bar(low, high, unit)]
    if len(finite) < sum(map(len, cells)):
        legend.append(key(tag("rect", class_="missing", width=28, height=12), "not measured"))
    if outlines:
        swatch = tag("path", d="M3 2H25V10H3z", class_="outline")
        legend.append(key(swatch, outline_name))
    shown = thinned(len(column_names), 12)
    rows = [
        (f"layer {row}", *(significant(cells[row][column], 4) for column in shown))
        for row in reversed(range(len(cells)))
    ]
    return figure(
        title,
        note,
        x=x,
        y_label="layer",
        y_ticks=_row_ticks(len(cells)),
        marks=[
            tag("rect", class_="missing", width=SIZE, height=SIZE),
            *marks,
            *(_frame(outline, x, height) for outline in outlines),
        ],
        overlay=[
            note_at(x.place(one.left), (one.row + 0.5) / len(cells), one.text)
            for one in outlines
            if one.text
        ],
        legend=legend,
        table=table(("", *(column_names[column] for column in shown)), rows, note=unit),
        grid=False,
        x_ticks=x_ticks,
        kind=_height_class(len(cells)),
    )


def timeline(
    title: str,
    note: str,
    rows: int,
    spans: Sequence[Span],
    events: Sequence[Event],
    *,
    x: Axis,
    head: Sequence[str],
    lines: Sequence[Sequence[str]],
) -> Markup:
    """How deep each row loops over time, decisions below. `head`, `lines`: the table behind it."""
    deepest = max((span.depth for span in spans), default=0)
    height = SIZE / (rows + 1)  # the lowest row is the decisions'
    marks, overlay = [], []
    for span in spans:
        top = SIZE - height * (span.row + 2)
        left, right = SIZE * x.place(span.left), SIZE * x.place(span.right)
        if span.depth == 0:
            middle = short(top + height / 2)
            marks.append(tag("path", d=f"M{short(left)} {middle}H{short(right)}", class_="rest"))
            continue
        shape = {"x": left, "y": top + height * 0.12, "width": right - left}
        strength = f"depth d{1 + round(3 * (span.depth - 1) / max(1, deepest - 1))}"
        marks.append(tag("rect", class_=strength, height=height * 0.76, **shape))
        place, width = x.place(span.left), x.place(span.right) - x.place(span.left)
        middle_of_row = (span.row + 1.5) / (rows + 1)
        overlay.append(note_at(place, middle_of_row, span.text, "tag in-bar", within=width))
    for event in events:
        left = SIZE * x.place(event.x)
        marks.append(_event(event.kind, left, SIZE - height / 2, height * 0.35))
    depths = sorted({span.depth for span in spans if span.depth})
    legend = [
        key(
            tag(
                "rect",
                class_=f"depth d{1 + round(3 * (depth - 1) / max(1, deepest - 1))}",
                width=28,
                height=12,
            ),
            f"loops ×{depth}",
        )
        for depth in depths
    ]
    kinds = {event.kind for event in events}
    words = {"activate": "a layer starts", "deepen": "one loop more", "freeze": "freeze"}
    words["stall"] = "nothing changed"
    legend += [key(_event(kind, 14, 6, 4), text) for kind, text in words.items() if kind in kinds]
    places = [((row + 1.5) / (rows + 1), name) for row, name in _row_names(rows)]
    return figure(
        title,
        note,
        x=x,
        y_label="layer; decisions below",
        y_ticks=places,
        marks=marks,
        overlay=overlay,
        legend=legend,
        table=table(head, lines),
        grid=False,
        kind=_height_class(rows + 1),
    )


def _event(kind: str, x: float, y: float, half: float) -> Markup:
    if kind in ("stall", "freeze"):
        tall = half if kind == "stall" else 2 * half
        path = f"M{short(x)} {short(y - tall)}V{short(y + tall)}"
    else:
        path = f"M{short(x)} {short(y)}h.1"  # paper shows no square end of a line without length
    return tag("path", d=path, class_=f"event {kind}")


def _frame(outline: Outline, x: Axis, height: float) -> Markup:
    left, right = SIZE * x.place(outline.left), SIZE * x.place(outline.right)
    top = SIZE - height * (outline.row + 1)
    corners = f"M{short(left)} {short(top)}H{short(right)}V{short(top + height)}H{short(left)}z"
    return tag("g", tag("path", d=corners, class_="halo"), tag("path", d=corners, class_="outline"))


def _row_names(rows: int) -> list[tuple[int, str]]:
    return [(row, str(row)) for row in thinned(rows, MAX_ROW_LABELS)]


def _row_ticks(rows: int) -> list[tuple[float, str]]:
    return [((row + 0.5) / rows, name) for row, name in _row_names(rows)]


def _height_class(rows: int) -> str:
    return "rows-few" if rows <= 8 else "rows-some" if rows <= 20 else "rows-many"


def _colour_bar(low: float, high: float, unit: str) -> Markup:
    blocks = [
        tag("rect", x=index, y=0, width=1.1, height=6, fill=shade_colour(index))
        for index in range(SHADES)
    ]
    bar = tag("svg", blocks, viewBox=f"0 0 {SHADES} 6", class_="bar", aria_hidden="true")
    ends = (f"{significant(low, 3)} ", f" {significant(high, 3)}")
    return joined([tag("span", ends[0], bar, ends[1], class_="scale"), tag("span", unit)])
