"""Plots of learning, cost and speed; several runs in one plot."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence

from sgt_ds.flops import Outcome
from sgt_ds.report.history import RunHistory, Update
from sgt_ds.report.html.lines import Form, Moment, Series, line_plot
from sgt_ds.report.html.markup import Markup

_ABSCISSAS = {"step": "step", "tokens": "tokens", "flops": "cumulative FLOPs"}
_NATS = "nats per token"
# Of the metrics of an evaluation: what a curve says, and its axis.
_SHOWN_SCORES = {
    "acc": ("Higher is better.", "accuracy (0–1)"),
    "bits_per_byte": ("Lower is better.", "bits per byte"),
}


def loss_plots(runs: Sequence[RunHistory]) -> list[Markup | None]:
    """Training and validation loss against step, tokens and cumulative FLOPs."""
    return [
        line_plot(
            f"Loss by {label}",
            "Cross-entropy of the global batch; dots are the validation set.",
            _losses(runs, key),
            x_label=label,
            y_label=f"loss ({_NATS})",
            moments=_restarts(runs) if key == "step" and len(runs) == 1 else (),
        )
        for key, label in _ABSCISSAS.items()
    ]


def convergence_plot(runs: Sequence[RunHistory]) -> Markup | None:
    """Perplexity against cumulative FLOPs: which run gets more out of the same compute."""
    return line_plot(
        "Convergence by compute",
        "Perplexity (e to the loss), logarithmic: a lower line has learned more from the same "
        "FLOPs.",
        [
            Series(one.name, one.xs, [_exp(value) for value in one.ys], one.colour, one.form)
            for one in _losses(runs, "flops")
        ],
        x_label=_ABSCISSAS["flops"],
        y_label="perplexity",
        log=True,
    )


def difference_plots(runs: Sequence[RunHistory]) -> list[Markup | None]:
    """Validation loss of each further run minus that of the first, at the same step and FLOPs."""
    first, *others = runs
    return [
        line_plot(
            f"Validation loss against {first.name}, at the same {label}",
            f"Below 0: better than {first.name}.",
            [
                Series(
                    run.name,
                    [getattr(point, key) for point in run.validations],
                    [
                        point.loss - _interpolated(first, key, getattr(point, key))
                        for point in run.validations
                    ],
                    colour,
                )
                for colour, run in enumerate(others, start=1)
            ],
            x_label=label,
            y_label=f"difference ({_NATS})",
            from_zero=True,
        )
        for key, label in (("step", "step"), ("flops", "cumulative FLOPs"))
    ]


def score_plots(runs: Sequence[RunHistory]) -> list[Markup | None]:
    """Tasks and texts that were evaluated while training, one plot each."""
    found = dict.fromkeys(
        (score.name, score.metric)
        for run in runs
        for score in run.scores
        if score.metric in _SHOWN_SCORES
    )
    return [
        line_plot(
            f"{name}, in the loop",
            _SHOWN_SCORES[metric][0],
            [
                Series(
                    run.name,
                    [one.step for one in run.scores if (one.name, one.metric) == (name, metric)],
                    [one.value for one in run.scores if (one.name, one.metric) == (name, metric)],
                    colour,
                )
                for colour, run in enumerate(runs)
            ],
            x_label="step",
            y_label=_SHOWN_SCORES[metric][1],
        )
        for name, metric in found
    ]


def optimizer_plots(runs: Sequence[RunHistory]) -> list[Markup | None]:
    """Gradient norm and learning rate."""
    return [
        line_plot(
            "Gradient norm",
            "Global L2 norm before clipping, logarithmic.",
            _by_step(runs, lambda update: update.grad_norm, "thin"),
            x_label="step",
            y_label="norm (no unit)",
            log=True,
        ),
        line_plot(
            "Learning rate",
            "Of each logged update.",
            _by_step(runs, lambda update: update.learning_rate),
            x_label="step",
            y_label="learning rate (no unit)",
            from_zero=True,
        ),
    ]


def overhead_plot(run: RunHistory) -> Markup | None:
    """FLOPs beyond vanilla: measured, planned at the earliest, planned with this run's growth."""
    series = _by_step([run], lambda update: update.overhead_ratio)
    series = [Series("measured", one.xs, one.ys, 0, "wide") for one in series]
    if run.planned is not None:
        end = max(run.last_step, 1)
        steps = [end * index / 200 for index in range(1, 201)]
        plans: tuple[tuple[str, Outcome | None, int, Form], ...] = (
            ("planned, growth at every window", run.planned.earliest, 1, "dashed"),
            ("planned, with this run's growth", run.planned.own, 2, "dotted"),
        )
        for name, outcome, colour, form in plans:
            if outcome is None:
                continue
            planned = [outcome.overhead_at(max(1, round(step))) for step in steps]
            whole = [float(max(1, round(step))) for step in steps]
            series.append(Series(name, whole, planned, colour, form))
    return line_plot(
        "FLOPs beyond vanilla",
        "Cumulative, as a share of what the same tokens cost without loops.",
        series,
        x_label="step",
        y_label="overhead (%)",
        from_zero=True,
        y_factor=100,
    )


def throughput_plots(runs: Sequence[RunHistory]) -> list[Markup | None]:
    """Tokens per second and the duration of an update."""
    moments = _restarts(runs) if len(runs) == 1 else ()
    return [
        line_plot(
            "Throughput",
            "Tokens per second of all ranks together, over each log interval.",
            _by_step(runs, lambda update: update.tokens_per_second, "thin"),
            x_label="step",
            y_label="tokens per second",
            moments=moments,
            from_zero=True,
        ),
        line_plot(
            "Duration of an update",
            "Of each logged update, on rank 0.",
            _by_step(runs, lambda update: update.step_seconds, "thin"),
            x_label="step",
            y_label="seconds",
            moments=moments,
            from_zero=True,
        ),
    ]


def _losses(runs: Sequence[RunHistory], key: str) -> list[Series]:
    series = []
    for colour, run in enumerate(runs):
        prefix = f"{run.name}, " if len(runs) > 1 else ""
        series += [
            Series(
                f"{prefix}training",
                [getattr(update, key) for update in run.updates],
                [update.loss for update in run.updates],
                colour,
                "thin",
            ),
            Series(
                f"{prefix}validation",
                [getattr(point, key) for point in run.validations],
                [point.loss for point in run.validations],
                colour,
                "points",
            ),
        ]
    return series


def _by_step(
    runs: Sequence[RunHistory], value: Callable[[Update], float], form: Form = "line"
) -> list[Series]:
    return [
        Series(
            run.name,
            [update.step for update in run.updates],
            [value(update) for update in run.updates],
            colour,
            form,
        )
        for colour, run in enumerate(runs)
    ]


def _restarts(runs: Sequence[RunHistory]) -> list[Moment]:
    return [Moment(start.step, "restart") for run in runs for start in run.restarts]


def _interpolated(run: RunHistory, key: str, at: float) -> float:
    """The validation loss of a run between its points; NaN outside them."""
    points = run.validations
    places = [getattr(point, key) for point in points]
    index = bisect_left(places, at)
    if index < len(points) and places[index] == at:
        return points[index].loss
    if index in (0, len(points)):
        return math.nan
    before, after = points[index - 1], points[index]
    share = (at - places[index - 1]) / (places[index] - places[index - 1])
    return before.loss + float(share) * (after.loss - before.loss)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
