"""The page: which section shows what, in which order. Knows no coordinate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone

from sgt_ds import __version__
from sgt_ds.report.history import RunHistory
from sgt_ds.report.html import curves, growth_plots, tables
from sgt_ds.report.html.markup import Child, Markup, joined, tag
from sgt_ds.report.html.palette import LIGHT
from sgt_ds.report.html.story import growth_story
from sgt_ds.report.html.style import style_sheet

MAX_RUNS = len(LIGHT)
"""As many as have a colour of their own."""

# Nothing may be fetched, not even by what a file's text could smuggle in.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def html_report(runs: Sequence[RunHistory], *, now: datetime | None = None) -> str:
    """The report of one run, or of up to `MAX_RUNS` side by side, as one HTML document."""
    title = " · ".join(run.name for run in runs)
    sections = [
        ("summary", "Summary", _summary(runs)),
        ("curves", "How it learns", _curves(runs)),
        ("growth", "How it grows", _growth(runs)),
        ("cost", "What growth costs", _cost(runs)),
        ("speed", "Throughput and restarts", _speed(runs)),
        ("environment", "Environment and settings", _environment(runs)),
    ]
    written = (now or datetime.now(timezone.utc)).strftime("%Y-%m-%d %H:%M UTC")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", f"{title} – training report"),
        tag("style", Markup(style_sheet())),
    )
    body = tag(
        "body",
        tag(
            "header",
            tag("h1", title),
            tag("p", f"Training report, written {written} by sgt-ds {__version__}.", class_="lead"),
            tag("nav", [tag("a", name, href=f"#{key}") for key, name, _ in sections]),
        ),
        tag(
            "main",
            [tag("section", tag("h2", name), body, id=key) for key, name, body in sections],
            tag(
                "footer",
                "Layers and heads count from 0. Entropies are normalized: 0 attends to one token, "
                "1 to all equally. FLOPs are counted, not measured by the hardware.",
            ),
        ),
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _summary(runs: Sequence[RunHistory]) -> Child:
    return tables.summary(runs)


def _curves(runs: Sequence[RunHistory]) -> Child:
    plots = [curves.convergence_plot(runs), *curves.loss_plots(runs)]
    if len(runs) > 1:
        plots += curves.difference_plots(runs)
    plots += [*curves.score_plots(runs), *curves.optimizer_plots(runs)]
    return _plots(plots, "No update was logged yet.")


def _growth(runs: Sequence[RunHistory]) -> Child:
    stories = [
        joined(
            [
                _name(run, runs),
                _story(run),
            ]
        )
        for run in runs
    ]
    # Row by row the same picture of every run, so that they stand beside each other.
    pictures: tuple[Callable[[RunHistory, Sequence[RunHistory]], Markup | None], ...] = (
        growth_plots.depth_timeline,
        growth_plots.entropy_map,
        growth_plots.head_map,
        growth_plots.variance_map,
    )
    if len(runs) == 1:
        return [
            stories,
            _plots([draw(runs[0], runs) for draw in pictures], "No entropy was measured yet."),
        ]
    rows = [
        tag(
            "div",
            [
                tag(
                    "div",
                    _name(run, runs),
                    draw(run, runs) or _nothing("Not measured."),
                    class_="column",
                )
                for run in runs
            ],
            class_="pair runs",
        )
        for draw in pictures
    ]
    return [stories, rows]


def _story(run: RunHistory) -> Markup:
    sentences = growth_story(run)
    long = " long" if len(sentences) > 4 else ""
    return tag("ol", [tag("li", text) for text in sentences], class_=f"story{long}")


def _cost(runs: Sequence[RunHistory]) -> Child:
    return tag(
        "div",
        [
            tag(
                "div",
                _name(run, runs),
                curves.overhead_plot(run) or _nothing("No update was logged yet."),
                tables.planned_and_measured(run),
                class_="column",
            )
            for run in runs
        ],
        class_="pair runs" if len(runs) > 1 else None,
    )


def _speed(runs: Sequence[RunHistory]) -> Child:
    return [
        _plots(curves.throughput_plots(runs), "No update was logged yet."),
        [[_name(run, runs) or tag("h3", "Starts"), tables.starts(run)] for run in runs],
    ]


def _environment(runs: Sequence[RunHistory]) -> Child:
    return [[_name(run, runs), tables.environment(run), tables.settings(run)] for run in runs]


def _plots(plots: Sequence[Markup | None], otherwise: str) -> Markup:
    drawn = [plot for plot in plots if plot is not None]
    return tag("div", drawn, class_="pair") if drawn else _nothing(otherwise)


def _nothing(text: str) -> Markup:
    return tag("p", text, class_="note")


def _name(run: RunHistory, runs: Sequence[RunHistory]) -> Markup | None:
    """A run's name with its colour, where there are several."""
    if len(runs) == 1:
        return None
    swatch = tag("span", class_="run-key", style=f"background:var(--s{runs.index(run)})")
    return tag("h3", swatch, run.name)
