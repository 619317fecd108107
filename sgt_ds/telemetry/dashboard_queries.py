"""Shared by the dashboards: variables for run, host and rank, queries and panels."""

from __future__ import annotations

from sgt_ds.telemetry.grafana import Panel, Query
from sgt_ds.telemetry.grafana_panels import stat, states

RUN = 'run=~"$run"'
RANKS = 'run=~"$run", host=~"$host", rank=~"$rank"'

RUN_HOST_RANK = (
    # Not from sgt_run_info: it brings the run's own name, all else carries the target's.
    ("run", "label_values(sgt_rank_step, run)"),
    ("host", 'label_values(up{run=~"$run"}, host)'),
    ("rank", 'label_values(up{run=~"$run", host=~"$host"}, rank)'),
)
GROWTH_EVENTS = (
    "Growth",
    # The window follows the step, which Grafana lengthens with the time shown: none lies in a gap.
    f'changes(sgt_growth_events_total{{{RUN}, kind!="stall"}}[$__rate_interval]) > 0',
)

STEP = f"max by (run) (sgt_rank_step{{{RUN}}})"
STEPS = f"max by (run) (sgt_run_steps{{{RUN}}})"

PHASE = stat(
    "Phase",
    "none",
    "Current growth phase.",
    Query(f"sgt_growth_phase{{{RUN}}} == 1", "{{phase}}", newest=True),
    text_mode="name",
)


def age(metric: str, selector: str = RUN) -> str:
    """Seconds since the moment that a metric tells."""
    return f"time() - max by (run) ({metric}{{{selector}}})"


def time_left(selector: str) -> str:
    """Seconds until the last update, at the mean duration of one since the process began."""
    steps = f"max by (run) (sgt_run_steps{{{selector}}})"
    step = f"max by (run) (sgt_rank_step{{{selector}}})"
    return f"({steps} - {step}) * on (run) run:sgt_step_duration_seconds:mean{{{selector}}}"


def loop_depth(height: int) -> Panel:
    """The panel of each layer's depth."""
    return states(
        "Loop depth by layer",
        "How many times a layer is re-applied; 0 if it does not loop.",
        Query(by_layer("sgt_loop_depth"), "layer {{layer}}"),
        show_value="auto",
        most=None,
        height=height,
    )


def phases(height: int) -> Panel:
    """The panel of the growth phase."""
    return states(
        "Phase over time",
        "1 while the run is in the phase: warmup, growing, fixed.",
        Query(f"sgt_growth_phase{{{RUN}}}", "{{phase}}"),
        height=height,
    )


def by_layer(metric: str) -> str:
    """A metric of the run's, one series per layer."""
    return f"max by (layer) ({in_order('layer', metric, RUN)})"


def in_order(label: str, metric: str, selector: str) -> str:
    """A metric whose `label` is a number, with a zero before a single digit: 02 sorts before 10."""
    return f'label_replace({metric}{{{selector}}}, "{label}", "0$1", "{label}", "(.)")'
