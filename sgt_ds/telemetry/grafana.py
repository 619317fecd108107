"""Grafana dashboards as code: panels in, the JSON that Grafana provisions out.

Panels are laid out from left to right, so none can overlap. Knows no metric and no kind of panel.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

GRID_COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# To every dashboard with the tag, at the same time and for the same run.
_LINKS = {
    "type": "dashboards",
    "title": "SGT",
    "tags": ["sgt"],
    "asDropdown": False,
    "icon": "external link",
    "includeVars": True,
    "keepTime": True,
    "targetBlank": False,
    "tooltip": "",
}


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the name of its series. `newest`: only the newest value is asked."""

    expr: str
    legend: str
    newest: bool = False
    format: Literal["time_series", "table", "heatmap"] = "time_series"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    `unit`: a Grafana unit id. `width`: of 24 columns. `options`, `defaults` (of the fields),
    `overrides` and `transformations` are Grafana's own. `most_points`: how many points a query may
    ask for.
    """

    title: str
    kind: str
    unit: str
    description: str
    queries: Sequence[Query]
    width: int = 8
    height: int = 8
    options: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    overrides: Sequence[dict[str, Any]] = ()
    transformations: Sequence[dict[str, Any]] = ()
    most_points: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading, set from left to right, wrapped at the grid's edge."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard; `uid` is its file's name too."""

    uid: str
    title: str
    description: str
    rows: Sequence[Row]
    variables: Sequence[tuple[str, str]]
    """Name and label_values query of each variable, in the order in which they narrow down."""
    annotations: Sequence[tuple[str, str]] = ()
    """Name and PromQL expression of each annotation."""

    def as_json(self) -> dict[str, Any]:
        """The document that Grafana takes."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["sgt"],
            "schemaVersion": 39,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-6h", "to": "now"},
            "timezone": "browser",
            "links": [_LINKS],
            "templating": {"list": list(_variables(self.variables))},
            "annotations": {"list": [_annotation(*pair) for pair in self.annotations]},
            "panels": list(_layout(self.rows)),
        }


def as_text(dashboard: Dashboard) -> str:
    """The text of a dashboard's file."""
    return json.dumps(dashboard.as_json(), indent=2, ensure_ascii=False) + "\n"


def _layout(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Row headings and panels with their places on the grid."""
    top, number = 0, 0
    for row in rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": top, "w": GRID_COLUMNS, "h": 1},
            "panels": [],
        }
        top, left, tallest = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > GRID_COLUMNS:
                top, left, tallest = top + tallest, 0, 0
            number += 1
            place = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            yield _panel(panel, number, place)
            left, tallest = left + panel.width, max(tallest, panel.height)
        top += tallest


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, **panel.defaults},
            "overrides": list(panel.overrides),
        },
        "options": panel.options,
        "targets": [
            {
                "refId": chr(ord("A") + position),
                "datasource": DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "format": query.format,
                "instant": query.newest,
                "range": not query.newest,
            }
            for position, query in enumerate(panel.queries)
        ],
    }
    if panel.transformations:
        document["transformations"] = list(panel.transformations)
    if panel.most_points is not None:
        document["maxDataPoints"] = panel.most_points
    return document


def _variables(variables: Sequence[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    yield {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
    }
    for name, query in variables:
        many = name != "run"  # a page shows one run, and any of its hosts and ranks
        yield {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 3,
            "multi": many,
            "includeAll": many,
            **({"allValue": ".*"} if many else {}),
        }


def _annotation(name: str, expr: str) -> dict[str, Any]:
    return {
        "name": name,
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "blue",
        "target": {"refId": "annotation", "expr": expr, "interval": "15s"},
        "titleFormat": name,
        "textFormat": "{{kind}}",
    }
