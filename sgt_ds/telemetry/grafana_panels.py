"""Kinds of Grafana panels, with colour-blind-safe colours.

Lines take fixed colours of the Okabe–Ito palette, by query or by the name of a series; lines whose
names nobody knows beforehand (ranks, runs) take shades of one blue. Heat maps go from yellow to
blue, whose lightness falls all the way. Knows no metric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sgt_ds.telemetry.grafana import Panel, Query

# Okabe and Ito's, without black and yellow: one of them is lost on either background.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F", "#8C5E2A")
SHADES = {"mode": "shades", "fixedColor": COLOURS[0]}
_HEAT = {"mode": "continuous-YlBl"}
_DEPTH = {"mode": "continuous-blues"}

_LEGEND: dict[str, Any] = {
    "calcs": [],
    "displayMode": "list",
    "placement": "bottom",
    "showLegend": True,
}
_NO_LEGEND = {**_LEGEND, "showLegend": False}
_TOOLTIP = {"mode": "multi", "sort": "desc"}


def stat(
    title: str,
    unit: str,
    description: str,
    query: Query,
    *,
    text_mode: str = "value",
    words: Mapping[float, str] | None = None,
) -> Panel:
    """A panel of one number, or of the name of its series. `words`: what values mean."""
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "none",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": text_mode,
        "percentChangeColorMode": "standard",
        "showPercentChange": False,
        "wideLayout": True,
    }
    defaults = {} if words is None else {"mappings": [_words(words)]}
    return Panel(title, "stat", unit, description, [query], 4, 4, options, defaults)


def lines(
    title: str,
    unit: str,
    description: str,
    *queries: Query,
    width: int = 8,
    log_scale: bool = False,
    dashed: str | None = None,
    names: Sequence[str] = (),
    stacked: bool = False,
) -> Panel:
    """A panel of lines over time.

    `dashed`: regular expression of the names drawn dashed. `names`: of the series, where one query
    gives several; else each query has a colour. `stacked`: areas that add up.
    """
    if names:
        coloured = [_coloured("byName", name, place) for place, name in enumerate(names)]
    else:
        coloured = [
            _coloured("byFrameRefID", _letter(place), place) for place in range(len(queries))
        ]
    custom = _custom(log_scale, stacked)
    overrides = [*coloured, *([] if dashed is None else [_dashes(dashed)])]
    defaults = {"custom": custom, "color": {"mode": "fixed", "fixedColor": COLOURS[0]}}
    options = {"legend": _LEGEND, "tooltip": _TOOLTIP}
    return Panel(
        title, "timeseries", unit, description, queries, width, 8, options, defaults, overrides
    )


def many_lines(title: str, unit: str, description: str, *queries: Query, width: int = 8) -> Panel:
    """A panel of lines whose names are not known beforehand: ranks, layers, runs."""
    defaults = {"custom": _custom(False, False), "color": SHADES}
    legend = {**_LEGEND, "displayMode": "table", "placement": "right", "calcs": ["lastNotNull"]}
    options = {"legend": legend, "tooltip": _TOOLTIP}
    return Panel(title, "timeseries", unit, description, queries, width, 8, options, defaults)


def heat_over_time(
    title: str,
    unit: str,
    description: str,
    query: Query,
    *,
    most: float | None = 1,
    width: int = 12,
    height: int = 10,
) -> Panel:
    """Rows of coloured cells over time. `most`: value of the darkest cell; None: highest seen."""
    limits = {} if most is None else {"min": 0, "max": most}
    return Panel(
        title,
        "status-history",
        unit,
        description,
        [query],
        width,
        height,
        {"showValue": "never", "rowHeight": 0.95, "legend": _NO_LEGEND, "tooltip": _TOOLTIP},
        {**limits, "color": _HEAT},
        most_points=120,  # a status history refuses more columns than it has pixels for
    )


def states(
    title: str,
    description: str,
    query: Query,
    *,
    show_value: str = "never",
    most: float | None = 1,
    width: int = 12,
    height: int = 10,
) -> Panel:
    """How states follow each other over time, a row a series."""
    options = {
        "showValue": show_value,
        "mergeValues": True,
        "rowHeight": 0.9,
        "alignValue": "left",
        "legend": _NO_LEGEND,
        "tooltip": _TOOLTIP,
    }
    defaults = {"min": 0, **({} if most is None else {"max": most}), "color": _DEPTH}
    return Panel(
        title,
        "state-timeline",
        "none",
        description,
        [query],
        width,
        height,
        options,
        defaults,
        most_points=300,
    )


def matrix(
    title: str,
    unit: str,
    description: str,
    expr: str,
    *,
    row: str,
    column: str,
    most: float | None = 1,
    depth: bool = False,
    width: int = 12,
    height: int = 10,
) -> Panel:
    """Newest values as a table of coloured cells: one label down, another one across."""
    limits = {"min": 0, **({} if most is None else {"max": most})}
    return Panel(
        title,
        "table",
        unit,
        description,
        [Query(expr, "", newest=True, format="table")],
        width,
        height,
        {"showHeader": True, "cellHeight": "sm", "frameIndex": 0},
        {
            **limits,
            "decimals": 0 if depth else 1,
            "color": _DEPTH if depth else _HEAT,
            "custom": {
                "align": "center",
                "minWidth": 50,
                "inspect": False,
                "cellOptions": {"type": "color-background", "mode": "basic"},
            },
        },
        [_plain_column(rf"{row}\{column}")],
        [
            _sorted_by(column),
            {
                "id": "groupingToMatrix",
                "options": {
                    "rowField": row,
                    "columnField": column,
                    "valueField": "Value",
                    "emptyValue": "null",
                },
            },
            _sorted_by(rf"{row}\{column}", down=True),  # deep layers on top
        ],
    )


def buckets_over_time(title: str, unit: str, description: str, expr: str) -> Panel:
    """A histogram's buckets over time."""
    options = {
        "calculate": False,
        "color": {
            "mode": "scheme",
            "scheme": "Cividis",
            "fill": "dark-blue",
            "scale": "exponential",
            "exponent": 0.5,
            "steps": 64,
            "reverse": False,
        },
        "cellGap": 1,
        "rowsFrame": {"layout": "auto"},
        "yAxis": {"axisPlacement": "left", "unit": unit},
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": False, "showColorScale": False},
        "showValue": "never",
        "exemplars": {"color": COLOURS[1]},
        "filterValues": {"le": 1e-9},
    }
    query = Query(expr, "{{le}}", format="heatmap")
    return Panel(title, "heatmap", unit, description, [query], 12, 9, options, most_points=120)


def table(
    title: str,
    description: str,
    queries: Sequence[Query],
    columns: Mapping[str, tuple[str, str]],
    *,
    hidden: Sequence[str] = (),
    links: Mapping[str, tuple[str, str]] | None = None,
    height: int = 12,
) -> Panel:
    """Newest values of several queries, joined where their labels agree.

    `columns`: heading and unit by Grafana's name of the field (a label, or `Value #A`), in order.
    `links`: title and address by heading.
    """
    overrides: list[dict[str, Any]] = [
        _override("byName", heading, unit=unit) for heading, unit in columns.values() if unit
    ]
    for heading, (link, url) in (links or {}).items():
        overrides.append(_override("byName", heading, links=[{"title": link, "url": url}]))
    organize = {
        "excludeByName": dict.fromkeys(["Time", *hidden], True),
        "renameByName": {name: heading for name, (heading, _) in columns.items()},
        "indexByName": {name: place for place, name in enumerate(columns)},
    }
    steps: list[dict[str, Any]] = [{"id": "merge", "options": {}}] if len(queries) > 1 else []
    return Panel(
        title,
        "table",
        "none",
        description,
        queries,
        24,
        height,
        {"showHeader": True, "cellHeight": "sm", "frameIndex": 0},
        {
            "color": {"mode": "fixed", "fixedColor": "text"},
            "custom": {"align": "auto", "inspect": False, "cellOptions": {"type": "auto"}},
        },
        overrides,
        [*steps, {"id": "organize", "options": organize}],
    )


def _custom(log_scale: bool, stacked: bool) -> dict[str, Any]:
    return {
        "lineWidth": 1,
        "fillOpacity": 40 if stacked else 0,
        "showPoints": "auto",
        "scaleDistribution": {"type": "log", "log": 10} if log_scale else {"type": "linear"},
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }


def _sorted_by(field: str, *, down: bool = False) -> dict[str, Any]:
    return {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": field, "desc": down}]}}


def _letter(place: int) -> str:
    return chr(ord("A") + place)


def _coloured(matcher: str, name: str, place: int) -> dict[str, Any]:
    colour = {"mode": "fixed", "fixedColor": COLOURS[place % len(COLOURS)]}
    return _override(matcher, name, color=colour)


def _dashes(pattern: str) -> dict[str, Any]:
    style = {"fill": "dash", "dash": [8, 8]}
    named = {"custom.lineStyle": style, "custom.lineWidth": 2}
    return _override("byRegexp", f"/{pattern}/", **named)


def _plain_column(name: str) -> dict[str, Any]:
    """The column of row names: no number, so no colour."""
    named = {"custom.cellOptions": {"type": "auto"}, "custom.width": 90, "unit": "string"}
    return _override("byName", name, **named)


def _override(matcher: str, name: str, **properties: Any) -> dict[str, Any]:
    return {
        "matcher": {"id": matcher, "options": name},
        "properties": [{"id": key, "value": value} for key, value in properties.items()],
    }


def _words(words: Mapping[float, str]) -> dict[str, Any]:
    return {
        "type": "value",
        "options": {f"{value:g}": {"text": text} for value, text in words.items()},
    }
