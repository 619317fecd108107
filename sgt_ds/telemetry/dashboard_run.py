"""The dashboard of one run: learning, growth, cost, ranks."""

from __future__ import annotations

from sgt_ds.telemetry.dashboard_queries import (
    GROWTH_EVENTS,
    PHASE,
    RANKS,
    RUN,
    RUN_HOST_RANK,
    STEP,
    STEPS,
    age,
    loop_depth,
    phases,
    time_left,
)
from sgt_ds.telemetry.grafana import Dashboard, Query, Row
from sgt_ds.telemetry.grafana_panels import lines, many_lines, stat


def _quantile(quantile: float) -> str:
    rate = f"rate(sgt_step_duration_seconds_bucket{{{RANKS}}}[5m])"
    return f"histogram_quantile({quantile}, sum by (run, le) ({rate}))"


_NOW = Row(
    "Now",
    (
        PHASE,
        stat("Step", "locale", "Applied optimizer updates.", Query(STEP, "{{run}}", newest=True)),
        stat(
            "Progress",
            "percentunit",
            "Applied updates as a share of those configured.",
            Query(f"{STEP} / {STEPS}", "{{run}}", newest=True),
        ),
        stat(
            "Time left",
            "s",
            "Remaining updates times the mean update duration since the process started.",
            Query(time_left(RUN), "{{run}}", newest=True),
        ),
        stat(
            "Time since the last update",
            "s",
            "Keeps growing while the run hangs, evaluates or skips updates.",
            Query(age("sgt_rank_last_step_timestamp_seconds"), "{{run}}", newest=True),
        ),
        stat(
            "Checkpoint age",
            "s",
            "Time since the newest complete checkpoint.",
            Query(age("sgt_checkpoint_last_success_timestamp_seconds"), "{{run}}", newest=True),
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
            Query(f"sgt_loss{{{RUN}}}", "training"),
            Query(f"sgt_validation_loss{{{RUN}}}", "validation"),
            dashed="^validation",
        ),
        lines(
            "Learning rate",
            "sci",
            "Of the latest logged update.",
            Query(f"sgt_learning_rate{{{RUN}}}", "learning rate"),
        ),
        lines(
            "Gradient norm",
            "none",
            "Global L2 norm before clipping, log scale.",
            Query(f"sgt_gradient_norm{{{RUN}}}", "gradient norm"),
            log_scale=True,
        ),
        many_lines(
            "In-loop accuracy",
            "percentunit",
            "Tasks evaluated during training; empty if RUN.yaml configures none.",
            Query(f'sgt_evaluation_score{{{RUN}, metric=~"acc|acc_norm"}}', "{{task}}, {{metric}}"),
            width=12,
        ),
        many_lines(
            "In-loop bits per byte",
            "none",
            "Tasks and texts evaluated during training; lower is better.",
            Query(f'sgt_evaluation_score{{{RUN}, metric=~"bpb|bits_per_byte"}}', "{{task}}"),
            width=12,
        ),
    ),
)

_GROWTH = Row(
    "Growth",
    (
        loop_depth(height=8),
        phases(height=8),
    ),
)

_COST = Row(
    "Cost",
    (
        lines(
            "FLOPs overhead, cumulative",
            "percentunit",
            "FLOPs spent beyond vanilla as a share of vanilla; with the plan, if known.",
            Query(f"sgt_flops_overhead_ratio{{{RUN}}}", "measured"),
            Query(f"sgt_flops_overhead_plan_ratio{{{RUN}}}", "plan"),
            dashed="^plan",
        ),
        lines(
            "FLOPs overhead, current",
            "percentunit",
            "The same over the last five minutes only: the cost of the current loops.",
            Query(f"run:sgt_flops_overhead_ratio:rate5m{{{RUN}}}", "last 5 minutes"),
        ),
        lines(
            "Ahead of the plan",
            "percentunit",
            "Measured minus planned overhead; above 0 the run costs more than planned, below 0 "
            "growth came later than it could.",
            Query(
                f"sgt_flops_overhead_ratio{{{RUN}}} - sgt_flops_overhead_plan_ratio{{{RUN}}}",
                "measured − plan",
            ),
        ),
        lines(
            "FLOPs per token",
            "sci",
            "Forward and backward, with the current loops.",
            Query(f"sgt_flops_per_token{{{RUN}}}", "FLOPs per token"),
        ),
        lines(
            "Model FLOPs utilisation",
            "percentunit",
            "Share of the GPUs' dense bf16 peak; absent if the peak is unknown.",
            Query(f"sgt_mfu_ratio{{{RUN}}}", "utilisation"),
        ),
        lines(
            "Throughput",
            "suffix: tokens/s",
            "Tokens per second of all ranks together.",
            Query(f"sgt_tokens_per_second{{{RUN}}}", "logged"),
            Query(f"run:sgt_tokens_per_second:avg5m{{{RUN}}}", "5-minute mean"),
            dashed="mean$",
        ),
        lines(
            "Update duration",
            "s",
            "Over the selected ranks.",
            Query(_quantile(0.5), "median"),
            Query(_quantile(0.95), "95th percentile"),
            dashed="^95th",
        ),
        lines(
            "Skipped updates",
            "none",
            "Updates skipped because gradients were not finite: so far, and in a row.",
            Query(f"sgt_skipped_steps_total{{{RUN}}}", "skipped"),
            Query(f"sgt_skipped_steps_consecutive{{{RUN}}}", "in a row"),
            dashed="row$",
        ),
    ),
)

_RANK_ROW = Row(
    "Ranks",
    (
        many_lines(
            "Step of each rank",
            "none",
            "Ranks are scraped at different times: parallel lines are healthy.",
            Query(f"sgt_rank_step{{{RANKS}}}", "rank {{rank}} on {{host}}"),
            width=12,
        ),
        many_lines(
            "Waiting for data",
            "percentunit",
            "Share of time that a rank waits for data.",
            Query(f"rank:sgt_data_wait_seconds:rate5m{{{RANKS}}}", "rank {{rank}} on {{host}}"),
            width=12,
        ),
    ),
)

RUN_DASHBOARD = Dashboard(
    uid="sgt-run",
    title="SGT run",
    description="One training run: learning, growth and cost.",
    rows=(_NOW, _LEARNING, _COST, _GROWTH, _RANK_ROW),
    variables=RUN_HOST_RANK,
    annotations=(GROWTH_EVENTS,),
)
