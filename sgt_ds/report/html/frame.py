"""Shared by all plots: a stretching SVG area with ticks and labels, legend, table.

The SVG holds marks alone and is stretched to its place; every text is HTML beside or above it, so
that it keeps its size on a phone. Knows no run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sgt_ds.report.html.markup import Child, Markup, joined, tag
from sgt_ds.report.html.scale import Axis

SIZE = 1000
"""Width and height of the marks' coordinates."""


def figure(
    title: str,
    note: str,
    *,
    x: Axis,
    y_label: str,
    y_ticks: Iterable[tuple[float, str]],
    marks: Child,
    table: Child,
    legend: Child = None,
    overlay: Child = None,
    grid: bool = True,
    x_ticks: Sequence[tuple[float, str]] | None = None,
    kind: str = "lines",
) -> Markup:
    """One plot. Ticks: place (0 to 1 from the lower left) and text. `overlay`: HTML over the marks.

    `kind`: a class of the style sheet, which gives the height.
    """
    x_ticks, y_ticks = _across(x) if x_ticks is None else list(x_ticks), list(y_ticks)
    lines = [_line(place, across=False) for place, _ in x_ticks] if grid else []
    lines += [_line(place, across=True) for place, _ in y_ticks] if grid else []
    picture = tag(
        "svg",
        tag("g", lines, class_="grid") if grid else None,
        marks,
        viewBox=f"0 0 {SIZE} {SIZE}",
        preserveAspectRatio="none",
        aria_hidden="true",
    )
    plot = tag(
        "div",
        tag("div", y_label, class_="y-label"),
        tag("div", [_tick(place, text, "bottom") for place, text in y_ticks], class_="y-ticks"),
        tag("div", picture, overlay, class_="area"),
        tag("div", [_tick(place, text, "left") for place, text in x_ticks], class_="x-ticks"),
        tag("div", x.label, class_="x-label"),
        class_=f"plot {kind}",
        role="img",
        aria_label=f"{title}: {y_label} against {x.label}. The table below has the numbers.",
    )
    return tag(
        "figure",
        tag("figcaption", tag("strong", title), " ", tag("span", note)),
        tag("div", legend, class_="legend") if legend else None,
        plot,
        tag("details", tag("summary", "Numbers"), tag("div", table, class_="scroll")),
        class_="chart",
    )


def table(head: Sequence[str], rows: Iterable[Sequence[Child]], *, note: str = "") -> Markup:
    """A table whose first column names the row."""
    return joined(
        [
            tag("p", note, class_="note") if note else None,
            tag(
                "table",
                tag("thead", tag("tr", [tag("th", text, scope="col") for text in head])),
                tag("tbody", [_row(cells) for cells in rows]),
            ),
        ]
    )


def key(swatch: Child, text: Child) -> Markup:
    """One entry of a legend."""
    return tag("span", tag("svg", swatch, viewBox="0 0 28 12", aria_hidden="true"), text)


def note_at(
    x: float, y: float, text: str, class_: str = "tag", *, within: float | None = None
) -> Markup:
    """A small text over the plot, its left end at a place (0 to 1 from the lower left).

    `within`: share of the width past which it is cut off.
    """
    style = f"left:{100 * x:.2f}%;bottom:{100 * y:.2f}%"
    if within is not None:
        style += f";max-width:{100 * within:.2f}%"
    return tag("span", text, class_=class_, style=style)


def _across(x: Axis) -> list[tuple[float, str]]:
    """Ticks of a horizontal axis: fewer where their texts are long."""
    ticks = x.ticks()
    return x.ticks(3) if max((len(text) for _, text in ticks), default=0) > 5 else ticks


def _row(cells: Sequence[Child]) -> Markup:
    first, *rest = cells
    return tag("tr", tag("th", first, scope="row"), [tag("td", cell) for cell in rest])


def _tick(place: float, text: str, side: str) -> Markup:
    edge = " first" if place < 0.03 else " last" if place > 0.97 else ""
    return tag("span", text, class_=f"tick{edge}", style=f"{side}:{100 * place:.2f}%")


def _line(place: float, *, across: bool) -> Markup:
    if across:
        at = SIZE * (1 - place)
        return tag("line", x1=0, x2=SIZE, y1=at, y2=at)
    at = SIZE * place
    return tag("line", x1=at, x2=at, y1=0, y2=SIZE)
