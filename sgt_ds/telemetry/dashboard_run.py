"""The dashboard of one run: how it learns, how it grows, what that costs, how its ranks do."""

from __future__ import annotations

from sgt_ds.telemetry.grafana import Dashboard, Panel, Query, Row, lines, stat

_RUN = 'run=~"$run"'
_RANKS = 'run=~"$run", host=~"$host", rank=~"$rank"'
_STEP = f"max by (run) (sgt_rank_step{{{_RUN}}})"
_STEPS = f"max by (run) (sgt_run_steps{{{_RUN}}})"
_MEAN_STEP = f"run:sgt_step_duration_seconds:mean{{{_RUN}}}"


def _age(metric: str) -> str:
    return f"time() - max by (run) ({metric}{{{_RUN}}})"


def _quantile(quantile: float) -> str:
    rate = f"rate(sgt_step_duration_seconds_bucket{{{_RANKS}}}[5m])"
    return f"histogram_quantile({quantile}, sum by (run, le) ({rate}))"


_NOW = Row(
    "Now",
    (
        stat(
            "Phase",
            "none",
            "Growth phase of now.",
            Query(f"sgt_growth_phase{{{_RUN}}} == 1", "{{phase}}", newest=True),
            text_mode="name",
        ),
        stat("Step", "locale", "Applied optimizer updates.", Query(_STEP, "{{run}}", newest=True)),
        stat(
            "Progress",
            "percentunit",
            "Applied updates as a share of those configured.",
            Query(f"{_STEP} / {_STEPS}", "{{run}}", newest=True),
        ),
        stat(
            "Time left",
            "s",
            "Remaining updates, at the mean duration of an update since the process began.",
            Query(f"({_STEPS} - {_STEP}) * on (run) {_MEAN_STEP}", "{{run}}", newest=True),
        ),
        stat(
            "Since the last update",
            "s",
            "Grows while the run hangs.",
            Query(_age("sgt_rank_last_step_timestamp_seconds"), "{{run}}", newest=True),
        ),
        stat(
            "Checkpoint age",
            "s",
            "Since the newest complete checkpoint.",
            Query(_age("sgt_checkpoint_last_success_timestamp_seconds"), "{{run}}", newest=True),
        ),
    ),
)

_LEARNING = Row(
    "Learning",
    (
        lines(
            "Loss",
            "none",
            "Cross-entropy in nats per token.",
            Query(f"sgt_loss{{{_RUN}}}", "training"),
            Query(f"sgt_validation_loss{{{_RUN}}}", "validation"),
            dashed="^validation",
        ),
        lines(
            "Learning rate",
            "sci",
            "Of the newest logged update.",
            Query(f"sgt_learning_rate{{{_RUN}}}", "learning rate"),
        ),
        lines(
            "Gradient norm",
            "none",
            "Global L2 norm before clipping, logarithmic.",
            Query(f"sgt_gradient_norm{{{_RUN}}}", "gradient norm"),
            log_scale=True,
        ),
    ),
)

_GROWTH = Row(
    "Growth",
    (
        Panel(
            title="Entropy by layer",
            kind="status-history",
            unit="percentunit",
            description="Heat map over time: normalized attention entropy, mean over the heads of "
            "a layer. High: the layer still attends to everything.",
            queries=[Query(f"sgt_layer_entropy_ratio{{{_RUN}}}", "layer {{layer}}")],
            width=12,
            height=10,
            options={"showValue": "never", "rowHeight": 0.95, "legend": {"showLegend": False}},
            # Blue to yellow to red: no step rests on red against green.
            defaults={"min": 0, "max": 1, "color": {"mode": "continuous-BlYlRd"}},
            most_points=120,  # a status history refuses more columns than it has pixels for
        ),
        Panel(
            title="Loop depth by layer",
            kind="state-timeline",
            unit="none",
            description="How many times a layer is re-applied; 0 where it does not loop.",
            queries=[Query(f"sgt_loop_depth{{{_RUN}}}", "layer {{layer}}")],
            width=12,
            height=10,
            options={"showValue": "auto", "mergeValues": True, "rowHeight": 0.9},
            defaults={"min": 0, "color": {"mode": "continuous-blues"}},
            most_points=300,
        ),
        Panel(
            title="Phase over time",
            kind="state-timeline",
            unit="none",
            description="1 while the run is in the phase: warmup, growing, fixed.",
            queries=[Query(f"sgt_growth_phase{{{_RUN}}}", "{{phase}}")],
            width=12,
            height=7,
            options={"showValue": "never", "mergeValues": True, "rowHeight": 0.9},
            defaults={"min": 0, "max": 1, "color": {"mode": "continuous-blues"}},
            most_points=300,
        ),
        lines(
            "Growth decisions",
            "none",
            "Decisions so far by kind; stall is a due window that changed nothing.",
            Query(f"sgt_growth_events_total{{{_RUN}}}", "{{kind}}"),
            width=12,
        ),
        lines(
            "Stalls by reason",
            "none",
            "Due windows so far that changed nothing, by what held growth up.",
            Query(f"sgt_growth_stalls_total{{{_RUN}}}", "{{reason}}"),
            width=12,
        ),
        lines(
            "Margin of the newest decision",
            "none",
            "Standard errors between the last layer (head) taken and the first left out; below 2 "
            "another batch could have led to another choice.",
            Query(f"sgt_growth_margin_standard_errors{{{_RUN}}}", "{{kind}}"),
            width=12,
        ),
    ),
)

_COST = Row(
    "Cost",
    (
        lines(
            "FLOPs overhead, cumulative",
            "percentunit",
            "FLOPs spent beyond vanilla as a share of vanilla; the plan beside it where known.",
            Query(f"sgt_flops_overhead_ratio{{{_RUN}}}", "measured"),
            Query(f"sgt_flops_overhead_plan_ratio{{{_RUN}}}", "plan"),
            dashed="^plan",
        ),
        lines(
            "FLOPs per token",
            "sci",
            "Forward and backward, with the loops of now.",
            Query(f"sgt_flops_per_token{{{_RUN}}}", "FLOPs per token"),
        ),
        lines(
            "Model FLOPs utilisation",
            "percentunit",
            "Share of the GPUs' dense bf16 peak; absent where the peak is unknown.",
            Query(f"sgt_mfu_ratio{{{_RUN}}}", "utilisation"),
        ),
        lines(
            "Throughput",
            "suffix: tokens/s",
            "Tokens per second of all ranks together.",
            Query(f"sgt_tokens_per_second{{{_RUN}}}", "logged"),
            Query(f"run:sgt_tokens_per_second:avg5m{{{_RUN}}}", "mean of 5 minutes"),
            dashed="^mean",
        ),
        lines(
            "Duration of an update",
            "s",
            "Over the chosen ranks.",
            Query(_quantile(0.5), "median"),
            Query(_quantile(0.95), "95th percentile"),
            dashed="^95th",
        ),
        lines(
            "Skipped updates",
            "none",
            "Updates skipped so far because gradients were not finite.",
            Query(f"sgt_skipped_steps_total{{{_RUN}}}", "skipped"),
        ),
    ),
)

_RANK_ROW = Row(
    "Ranks",
    (
        lines(
            "Step of each rank",
            "none",
            "Ranks are scraped at different moments: lines that run side by side are well.",
            Query(f"sgt_rank_step{{{_RANKS}}}", "rank {{rank}} on {{host}}"),
        ),
        lines(
            "Waiting for data",
            "percentunit",
            "Share of the time that a rank waits for data.",
            Query(f"rank:sgt_data_wait_seconds:rate5m{{{_RANKS}}}", "rank {{rank}} on {{host}}"),
        ),
        lines(
            "Host memory of each rank",
            "bytes",
            "Resident memory of the training process.",
            Query(f"process_resident_memory_bytes{{{_RANKS}}}", "rank {{rank}} on {{host}}"),
        ),
    ),
)

RUN_DASHBOARD = Dashboard(
    uid="sgt-run",
    title="SGT run",
    description="One training run: how it learns, how it grows, what that costs.",
    rows=(_NOW, _LEARNING, _GROWTH, _COST, _RANK_ROW),
    variables=(
        # Not from sgt_run_info: it brings the run's own name, all else carries the target's.
        ("run", "label_values(sgt_rank_step, run)"),
        ("host", 'label_values(up{run=~"$run"}, host)'),
        ("rank", 'label_values(up{run=~"$run", host=~"$host"}, rank)'),
    ),
    annotations=(("Growth", f'changes(sgt_growth_events_total{{{_RUN}, kind!="stall"}}[1m]) > 0'),),
)
