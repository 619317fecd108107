"""Every metric that the exporters serve, in one table: name, type, unit, labels, meaning.

The exporter, the reference page and the tests read it. Knows no server and no run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram", "info"]
Scope = Literal["model", "rank"]

PHASES = ("warmup", "growing", "fixed")
RULES = ("activate", "deepen", "freeze", "stall")
# Causes of a stall as the journal words them; what a method of one's own adds counts as other.
STALL_REASONS = ("candidate gone", "no eligible layer", "not finite", "not measured", "other")
MARGIN_KINDS = ("layer", "head")
RUN_STATES = ("running", "completed", "stopped", "failed")
INFO_LABELS = ("run", "method", "preset", "version", "config_hash")

# From a small model on one GPU (tens of milliseconds) to a large global batch on a few (minutes).
STEP_BUCKETS_SECONDS = (
    *(0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0),
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `scope`: `model` is served by global rank 0 alone, `rank` by every rank."""

    name: str
    kind: Kind
    unit: str
    scope: Scope
    help: str
    labels: tuple[str, ...] = ()


METRICS: tuple[Metric, ...] = (
    Metric(
        "sgt_loss",
        "gauge",
        "nats per token",
        "model",
        "Training loss of the newest logged update, mean over the global batch.",
    ),
    Metric(
        "sgt_validation_loss",
        "gauge",
        "nats per token",
        "model",
        "Validation loss at the newest validation.",
    ),
    Metric(
        "sgt_learning_rate",
        "gauge",
        "1",
        "model",
        "Learning rate of the newest logged update.",
    ),
    Metric(
        "sgt_gradient_norm",
        "gauge",
        "1",
        "model",
        "Global L2 norm of the gradients before clipping, newest logged update.",
    ),
    Metric(
        "sgt_tokens_total",
        "counter",
        "tokens",
        "model",
        "Tokens consumed by the run, those of skipped updates too.",
    ),
    Metric(
        "sgt_source_tokens_total",
        "counter",
        "tokens",
        "model",
        "Tokens consumed from one source of the mixture (data.train), over all its epochs.",
        ("source",),
    ),
    Metric(
        "sgt_tokens_per_second",
        "gauge",
        "tokens per second",
        "model",
        "Tokens per second of the whole run over the newest log interval.",
    ),
    Metric(
        "sgt_optimizer_steps_total",
        "counter",
        "updates",
        "model",
        "Optimizer updates applied by the run.",
    ),
    Metric(
        "sgt_run_steps",
        "gauge",
        "updates",
        "model",
        "Optimizer updates that the run is configured to apply.",
    ),
    Metric(
        "sgt_skipped_steps_total",
        "counter",
        "updates",
        "model",
        "Updates skipped because gradients were not finite.",
    ),
    Metric(
        "sgt_flops_total",
        "counter",
        "FLOPs",
        "model",
        "Floating point operations spent by the run, counted as in the paper.",
    ),
    Metric(
        "sgt_vanilla_flops_total",
        "counter",
        "FLOPs",
        "model",
        "Floating point operations that the same tokens cost without any loop.",
    ),
    Metric(
        "sgt_flops_overhead_ratio",
        "gauge",
        "ratio",
        "model",
        "Cumulative FLOPs spent beyond vanilla, as a share of vanilla.",
    ),
    Metric(
        "sgt_flops_overhead_plan_ratio",
        "gauge",
        "ratio",
        "model",
        "What sgt_flops_overhead_ratio is planned to be at this step.",
    ),
    Metric(
        "sgt_flops_per_token",
        "gauge",
        "FLOPs per token",
        "model",
        "Floating point operations of one token, forward and backward, with the loops of now.",
    ),
    Metric(
        "sgt_mfu_ratio",
        "gauge",
        "ratio",
        "model",
        "Model FLOPs utilisation: FLOPs per second as a share of the GPUs' dense bf16 peak.",
    ),
    Metric(
        "sgt_layer_entropy_ratio",
        "gauge",
        "ratio",
        "model",
        "Normalized attention entropy of a layer: moving average, mean over its heads.",
        ("layer",),
    ),
    Metric(
        "sgt_layer_entropy_variance",
        "gauge",
        "ratio squared",
        "model",
        "Variance of the normalized attention entropy between the heads of a layer.",
        ("layer",),
    ),
    Metric(
        "sgt_layer_entropy_stderr_ratio",
        "gauge",
        "ratio",
        "model",
        "Standard error of sgt_layer_entropy_ratio over the sequences, an upper bound.",
        ("layer",),
    ),
    Metric(
        "sgt_entropy_not_finite_total",
        "counter",
        "updates",
        "model",
        "Measured updates in which the entropy of some head was NaN or infinite.",
    ),
    Metric(
        "sgt_head_entropy_ratio",
        "gauge",
        "ratio",
        "model",
        "Normalized attention entropy of a head: moving average.",
        ("layer", "head"),
    ),
    Metric(
        "sgt_loop_depth",
        "gauge",
        "loops",
        "model",
        "How many times a layer is re-applied; 0 where it does not loop.",
        ("layer",),
    ),
    Metric(
        "sgt_looped_head",
        "gauge",
        "1",
        "model",
        "1 for each head that a looping layer re-applies; absent for all others.",
        ("layer", "head"),
    ),
    Metric(
        "sgt_growth_phase",
        "gauge",
        "1",
        "model",
        "1 for the phase that the run is in, 0 for the others.",
        ("phase",),
    ),
    Metric(
        "sgt_growth_events_total",
        "counter",
        "decisions",
        "model",
        "Growth decisions by kind; stall is a due window that changed nothing.",
        ("kind",),
    ),
    Metric(
        "sgt_growth_stalls_total",
        "counter",
        "decisions",
        "model",
        "Due windows that changed nothing, by what held growth up.",
        ("reason",),
    ),
    Metric(
        "sgt_growth_margin_standard_errors",
        "gauge",
        "standard errors",
        "model",
        "Newest decision: between the last layer or head taken and the first left out; "
        "absent where nothing was left out.",
        ("kind",),
    ),
    Metric(
        "sgt_growth_within_noise",
        "gauge",
        "1",
        "model",
        "1 where a margin of the newest decision is below 2 standard errors; absent without one.",
    ),
    Metric(
        "sgt_checkpoint_duration_seconds",
        "gauge",
        "seconds",
        "model",
        "Duration of the newest checkpoint.",
    ),
    Metric(
        "sgt_checkpoint_last_success_timestamp_seconds",
        "gauge",
        "Unix seconds",
        "model",
        "When the newest checkpoint was complete; after a resume, when the loaded one was taken.",
    ),
    Metric(
        "sgt_step_duration_seconds",
        "histogram",
        "seconds",
        "rank",
        "Duration of an update on this rank, since this process began.",
    ),
    Metric(
        "sgt_data_wait_seconds_total",
        "counter",
        "seconds",
        "rank",
        "Time that this rank waited for data, since this process began.",
    ),
    Metric(
        "sgt_rank_step",
        "gauge",
        "updates",
        "rank",
        "Applied updates as this rank counts them.",
    ),
    Metric(
        "sgt_rank_last_step_timestamp_seconds",
        "gauge",
        "Unix seconds",
        "rank",
        "When this rank ended its newest update; before the first, when its exporter started.",
    ),
    Metric(
        "sgt_run_state",
        "gauge",
        "1",
        "rank",
        "1 for the state that the run is in on this rank, 0 for the others.",
        ("state",),
    ),
    Metric(
        "sgt_telemetry_failures_total",
        "counter",
        "failures",
        "rank",
        "Publications and scrapes that failed on this rank; training went on.",
    ),
    Metric(
        "sgt_run_info",
        "info",
        "1",
        "rank",
        "What this process trains: always 1, the facts are labels.",
        (*INFO_LABELS, "rank"),
    ),
)

BY_NAME = {metric.name: metric for metric in METRICS}
