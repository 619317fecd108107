"""The growth dashboard: entropies, loops, and the decisions that connect them."""

from __future__ import annotations

from sgt_ds.telemetry.dashboard_queries import (
    GROWTH_EVENTS,
    PHASE,
    RUN,
    RUN_HOST_RANK,
    by_layer,
    in_order,
    loop_depth,
    phases,
)
from sgt_ds.telemetry.grafana import Dashboard, Query, Row
from sgt_ds.telemetry.grafana_panels import (
    heat_over_time,
    lines,
    many_lines,
    matrix,
    stat,
    states,
)
from sgt_ds.telemetry.metric import MARGIN_KINDS, RULES, STALL_REASONS


def _by_head(metric: str) -> str:
    return (
        f"max by (layer, head) (label_replace({in_order('layer', metric, RUN)}, "
        '"head", "0$1", "head", "(.)"))'
    )


_NOW = Row(
    "Now",
    (
        PHASE,
        stat(
            "Looping layers",
            "none",
            "Layers that are re-applied.",
            Query(f"count(sgt_loop_depth{{{RUN}}} > 0) or vector(0)", "layers", newest=True),
        ),
        stat(
            "Deepest loop",
            "none",
            "The highest number of times that a layer is re-applied.",
            Query(f"max(sgt_loop_depth{{{RUN}}})", "depth", newest=True),
        ),
        stat(
            "Changes",
            "none",
            "Decisions so far that changed a loop or froze growth.",
            Query(f'sum(sgt_growth_events_total{{{RUN}, kind!="stall"}})', "changes", newest=True),
        ),
        stat(
            "Stalls",
            "none",
            "Due windows so far that changed nothing.",
            Query(f'sum(sgt_growth_events_total{{{RUN}, kind="stall"}})', "stalls", newest=True),
        ),
        stat(
            "Latest decision",
            "none",
            "Whether its margin stands out from noise; within noise, another batch could have led "
            "to another choice.",
            Query(f"max(sgt_growth_within_noise{{{RUN}}})", "margin", newest=True),
            words={0: "clear", 1: "within noise"},
        ),
    ),
)

_ENTROPY = Row(
    "Entropy",
    (
        heat_over_time(
            "Entropy by layer",
            "percentunit",
            "Layer × time: normalized attention entropy, mean over the heads of a layer. Dark: "
            "the layer still attends to all positions.",
            Query(by_layer("sgt_layer_entropy_ratio"), "layer {{layer}}"),
        ),
        matrix(
            "Current entropy by head",
            "percentunit",
            "Layer × head, latest moving average: the values from which growth chooses heads.",
            _by_head("sgt_head_entropy_ratio"),
            row="layer",
            column="head",
        ),
        heat_over_time(
            "Differences between heads",
            "sci",
            "Layer × time: variance of the entropies of a layer's heads. It rises as heads "
            "specialise.",
            Query(by_layer("sgt_layer_entropy_variance"), "layer {{layer}}"),
            most=None,
        ),
        many_lines(
            "Entropy per layer",
            "percentunit",
            "The first heat map as lines, for values that are close together.",
            Query(by_layer("sgt_layer_entropy_ratio"), "layer {{layer}}"),
            width=12,
        ),
    ),
)

_LOOPS = Row(
    "Loops",
    (
        loop_depth(height=10),
        states(
            "Looped heads over time",
            "One row for each head that loops or has looped; rows of heads that fade out end.",
            Query(_by_head("sgt_looped_head"), "layer {{layer}} head {{head}}"),
        ),
        matrix(
            "Currently looped heads",
            "none",
            "Layer × head: how many times a head is re-applied; empty if it is not.",
            f"{_by_head('sgt_looped_head')} * on (layer) group_left () "
            f"{by_layer('sgt_loop_depth')}",
            row="layer",
            column="head",
            most=None,
            depth=True,
        ),
        phases(height=10),
    ),
)

_DECISIONS = Row(
    "Decisions",
    (
        lines(
            "Growth decisions",
            "none",
            "Decisions so far by kind; stall is a due window that changed nothing.",
            Query(f"sgt_growth_events_total{{{RUN}}}", "{{kind}}"),
            width=12,
            names=RULES,
        ),
        lines(
            "Stalls by reason",
            "none",
            "Due windows so far that changed nothing, by reason.",
            Query(f"sgt_growth_stalls_total{{{RUN}}}", "{{reason}}"),
            width=12,
            names=STALL_REASONS,
        ),
        lines(
            "Margin of the latest decision",
            "none",
            "Standard errors between the last layer (head) chosen and the first left out; below "
            "2, another batch could have led to another choice.",
            Query(f"sgt_growth_margin_standard_errors{{{RUN}}}", "{{kind}}"),
            width=12,
            names=MARGIN_KINDS,
        ),
        lines(
            "Precision of the entropies",
            "percentunit",
            "Largest standard error of a layer's entropy, and the spread between layers: a choice "
            "is meaningful if the second is many times the first.",
            Query(f"max by (run) (sgt_layer_entropy_stderr_ratio{{{RUN}}})", "standard error"),
            Query(f"run:sgt_layer_entropy_ratio:spread{{{RUN}}}", "between layers"),
            width=12,
            log_scale=True,
        ),
        lines(
            "Non-finite entropies",
            "none",
            "Measured updates so far in which a head's entropy was NaN or infinite.",
            Query(f"sgt_entropy_not_finite_total{{{RUN}}}", "updates"),
            width=12,
        ),
    ),
)

GROWTH_DASHBOARD = Dashboard(
    uid="sgt-growth",
    title="SGT growth",
    description="Growth of one run: entropies, loops, decisions.",
    rows=(_NOW, _ENTROPY, _LOOPS, _DECISIONS),
    variables=RUN_HOST_RANK,
    annotations=(GROWTH_EVENTS,),
)
