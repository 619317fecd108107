"""The state of an exporter at one moment, and its Prometheus metric families.

A snapshot is immutable: training replaces it whole, a scrape reads whichever is there. So a scrape
can neither see half an update nor hold training up, and what is no longer so is gone at once.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family

from sgt_ds.telemetry.hardware import Hardware
from sgt_ds.telemetry.metric import (
    INFO_LABELS,
    MARGIN_KINDS,
    PHASES,
    RULES,
    RUN_STATES,
    STALL_REASONS,
    STEP_BUCKETS_SECONDS,
    STEP_PARTS,
    Metric,
)
from sgt_ds.telemetry.metrics import METRICS
from sgt_ds.telemetry.record import StepRecord, Totals

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Label values and value of each series of a metric."""

Counters = dict[str, dict[str, float]]
"""Counters by metric name and by the value of the one label, "" where a metric has none."""


@dataclass(frozen=True, slots=True)
class StepHistogram:
    """Durations of updates: one count a bucket (not cumulative), the last for what exceeds all."""

    counts: tuple[int, ...] = (0,) * (len(STEP_BUCKETS_SECONDS) + 1)
    sum_seconds: float = 0.0

    def observe(self, seconds: float) -> StepHistogram:
        """A copy with one more duration."""
        counts = list(self.counts)
        counts[bisect.bisect_left(STEP_BUCKETS_SECONDS, seconds)] += 1
        return StepHistogram(tuple(counts), self.sum_seconds + seconds)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device in bytes, as torch's allocator counts it."""

    allocated: int
    reserved: int
    peak: int
    """Most that was allocated since the process began."""
    size: int
    """What the device has."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a scrape can see."""

    rank: int
    run_wide: bool
    host_wide: bool
    num_layers: int
    num_heads: int
    info: Mapping[str, str]
    step_timestamp: float
    progress_timestamp: float = 0.0
    """Beside updates; below `step_timestamp` where nothing else is known."""
    record: StepRecord | None = None
    totals: Totals | None = None
    step: int = 0
    counts_steps: bool = True
    """Whether it is known how many updates came before this process; until then none is counted."""
    counts_events: bool = True
    """As `counts_steps`, of skips, growth decisions, failed checkpoints and the like."""
    run_steps: int | None = None
    checkpoint_steps: int | None = None
    events_before: Counters = field(default_factory=dict)
    """Events that scrapers have seen and this process's counts lack: those after the checkpoint it
    continues from."""
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    histogram: StepHistogram = StepHistogram()
    data_wait_seconds: float = 0.0
    part_seconds: Mapping[str, float] = field(
        default_factory=lambda: dict.fromkeys(STEP_PARTS, 0.0)
    )
    collective_seconds: float = 0.0
    device_memory: DeviceMemory | None = None
    hardware: Hardware = field(default_factory=Hardware)
    validation_loss: float | None = None
    evaluation: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    growth_events: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(RULES, 0))
    growth_stalls: Mapping[str, int] = field(
        default_factory=lambda: dict.fromkeys(STALL_REASONS, 0)
    )
    growth_margin: Mapping[str, float | None] = field(
        default_factory=lambda: dict.fromkeys(MARGIN_KINDS)
    )
    within_noise: bool | None = None
    checkpoint_seconds: float | None = None
    load_seconds: float | None = None
    checkpoint_timestamp: float | None = None
    checkpoint_failures: int = 0
    not_finite: int = 0
    run_state: str = "running"
    failures: int = 0


def counters_of(snapshot: Snapshot) -> Counters:
    """The run-wide counters: those whose value is a run's total, whichever process counts.

    None whose beginning is not known: Prometheus would count the step from 0 to it as news.
    """
    totals, counters = snapshot.totals, Counters()
    if snapshot.counts_steps:
        counters["sgt_optimizer_steps_total"] = {"": snapshot.step}
    for name, events in _events(snapshot).items() if snapshot.counts_events else ():
        before = snapshot.events_before.get(name, {})
        counters[name] = {label: count + before.get(label, 0) for label, count in events.items()}
    if totals is not None:
        counters["sgt_tokens_total"] = {"": totals.tokens}
        counters["sgt_source_tokens_total"] = dict(totals.source_tokens)
        counters["sgt_flops_total"] = {"": totals.flops}
        counters["sgt_vanilla_flops_total"] = {"": totals.vanilla_flops}
    return counters


def events_beyond(snapshot: Snapshot, seen: Counters) -> Counters:
    """How many more events scrapers have `seen` than the snapshot counts itself.

    After a resume, tokens and FLOPs come to what they were; a save that fails again is news.
    """
    return {
        name: {
            label: max(0, seen.get(name, {}).get(label, 0) - count)
            for label, count in events.items()
        }
        for name, events in _events(snapshot).items()
    }


def _events(snapshot: Snapshot) -> Counters:
    """What this process counts beside the run's progress, from the checkpoint's counts on."""
    return {
        "sgt_skipped_steps_total": {"": snapshot.skipped_steps},
        "sgt_growth_events_total": dict(snapshot.growth_events),
        "sgt_growth_stalls_total": dict(snapshot.growth_stalls),
        "sgt_checkpoint_failures_total": {"": snapshot.checkpoint_failures},
        "sgt_entropy_not_finite_total": {"": snapshot.not_finite},
    }


def highest(first: Counters, second: Counters) -> Counters:
    """Of each counter, the higher value of two."""
    merged = {name: dict(values) for name, values in first.items()}
    for name, values in second.items():
        mine = merged.setdefault(name, {})
        for label, value in values.items():
            mine[label] = max(value, mine.get(label, value))
    return merged


def families(snapshot: Snapshot, counters: Counters) -> Iterator[Family]:
    """The metric families of a snapshot, in the table's order, empty ones left out.

    `counters`: the run-wide counters to serve.
    """
    values = _values(snapshot, counters)
    served = {"run": snapshot.run_wide, "host": snapshot.host_wide, "rank": True}
    for metric in METRICS:
        if not served[metric.scope]:
            continue
        family = _family(metric, values, snapshot)
        if family.samples:
            yield family


def _family(metric: Metric, values: Mapping[str, Samples], snapshot: Snapshot) -> Family:
    if metric.kind == "histogram":
        bounds = [*map(str, STEP_BUCKETS_SECONDS), "+Inf"]
        counts = accumulate(snapshot.histogram.counts)
        return HistogramMetricFamily(
            metric.name,
            metric.help,
            buckets=list(zip(bounds, counts, strict=True)),
            sum_value=snapshot.histogram.sum_seconds,
        )
    if metric.kind == "info":
        labels = {name: snapshot.info.get(name, "") for name in INFO_LABELS}
        name = metric.name.removesuffix("_info")
        return InfoMetricFamily(name, metric.help, {**labels, "rank": str(snapshot.rank)})
    kind: Callable[..., Any] = (
        CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    )
    family: Family = kind(metric.name, metric.help, labels=metric.labels)
    for labels_, value in values.get(metric.name, ()):
        family.add_metric(labels_, value)  # type: ignore[attr-defined]
    return family


def _values(snapshot: Snapshot, counters: Counters) -> dict[str, Samples]:
    values: dict[str, Samples] = {
        name: [((label,) if label else (), value) for label, value in series.items()]
        for name, series in counters.items()
    }
    values |= {
        "sgt_run_steps": _one(snapshot.run_steps),
        "sgt_skipped_steps_consecutive": _one(snapshot.skipped_in_a_row),
        "sgt_validation_loss": _one(snapshot.validation_loss),
        "sgt_evaluation_score": [
            ((task, metric), value)
            for task, scores in snapshot.evaluation.items()
            for metric, value in scores.items()
        ],
        "sgt_growth_margin_standard_errors": [
            ((kind,), value) for kind, value in snapshot.growth_margin.items() if value is not None
        ],
        "sgt_growth_within_noise": _one(snapshot.within_noise),
        "sgt_checkpoint_duration_seconds": _one(snapshot.checkpoint_seconds),
        "sgt_checkpoint_load_duration_seconds": _one(snapshot.load_seconds),
        "sgt_checkpoint_interval_steps": _one(snapshot.checkpoint_steps),
        "sgt_checkpoint_last_success_timestamp_seconds": _one(snapshot.checkpoint_timestamp),
        "sgt_data_wait_seconds_total": _one(snapshot.data_wait_seconds),
        "sgt_step_part_seconds_total": [
            ((part,), seconds) for part, seconds in snapshot.part_seconds.items()
        ],
        "sgt_growth_collective_seconds_total": _one(snapshot.collective_seconds),
        "sgt_rank_step": _one(snapshot.step),
        "sgt_rank_last_step_timestamp_seconds": _one(snapshot.step_timestamp),
        "sgt_rank_last_progress_timestamp_seconds": _one(
            max(snapshot.step_timestamp, snapshot.progress_timestamp)
        ),
        "sgt_run_state": _one_of(RUN_STATES, snapshot.run_state),
        "sgt_telemetry_failures_total": _one(snapshot.failures),
    }
    values |= _hardware_values(snapshot.hardware)
    if snapshot.device_memory is not None:
        values |= _device_memory_values(snapshot.device_memory)
    if snapshot.record is not None:
        values |= _record_values(snapshot.record, snapshot)
    return values


def _hardware_values(hardware: Hardware) -> dict[str, Samples]:
    return {
        "sgt_host_memory_available_bytes": _one(hardware.memory_available_bytes),
        "sgt_host_memory_size_bytes": _one(hardware.memory_size_bytes),
        "sgt_host_network_receive_bytes_total": _one(hardware.network_receive_bytes),
        "sgt_host_network_transmit_bytes_total": _one(hardware.network_transmit_bytes),
        "sgt_run_disk_free_bytes": _one(hardware.disk_free_bytes),
        "sgt_run_disk_size_bytes": _one(hardware.disk_size_bytes),
        "sgt_gpu_utilization_ratio": _one(hardware.gpu_utilization_ratio),
        "sgt_gpu_power_watts": _one(hardware.gpu_power_watts),
        "sgt_gpu_energy_joules_total": _one(hardware.gpu_energy_joules),
    }


def _device_memory_values(memory: DeviceMemory) -> dict[str, Samples]:
    return {
        "sgt_gpu_memory_allocated_bytes": _one(memory.allocated),
        "sgt_gpu_memory_reserved_bytes": _one(memory.reserved),
        "sgt_gpu_memory_peak_bytes": _one(memory.peak),
        "sgt_gpu_memory_size_bytes": _one(memory.size),
    }


def _record_values(record: StepRecord, snapshot: Snapshot) -> dict[str, Samples]:
    depth = {layer: loop.depth for layer, loop in record.loops.loops.items()}
    looped = {
        layer: range(snapshot.num_heads) if loop.heads is None else loop.heads
        for layer, loop in record.loops.loops.items()
    }
    entropy = [
        (layer, [(head, value) for head, value in enumerate(heads) if math.isfinite(value)])
        for layer, heads in enumerate(record.entropy or ())
    ]
    measured = [(str(layer), [value for _, value in heads]) for layer, heads in entropy if heads]
    return {
        "sgt_loss": _one(record.loss),
        "sgt_learning_rate": _one(record.learning_rate),
        "sgt_gradient_norm": _one(record.grad_norm),
        "sgt_tokens_per_second": _one(record.tokens_per_second),
        "sgt_flops_overhead_ratio": _one(record.overhead_ratio),
        "sgt_flops_overhead_plan_ratio": _one(record.planned_overhead_ratio),
        "sgt_flops_per_token": _one(record.flops_per_token),
        "sgt_mfu_ratio": _one(record.mfu_ratio),
        "sgt_growth_phase": _one_of(PHASES, record.phase),
        "sgt_loop_depth": [
            ((str(layer),), depth.get(layer, 0)) for layer in range(snapshot.num_layers)
        ],
        "sgt_looped_head": [
            ((str(layer), str(head)), 1) for layer, heads in looped.items() for head in heads
        ],
        "sgt_layer_entropy_ratio": [((layer,), _mean(heads)) for layer, heads in measured],
        "sgt_layer_entropy_variance": [((layer,), _variance(heads)) for layer, heads in measured],
        "sgt_layer_entropy_stderr_ratio": [
            ((str(layer),), value)
            for layer, value in enumerate(record.layer_stderr or ())
            if math.isfinite(value)
        ],
        "sgt_head_entropy_ratio": [
            ((str(layer), str(head)), value) for layer, heads in entropy for head, value in heads
        ],
    }


def _one(value: float | None) -> Samples:
    return [] if value is None else [((), value)]


def _one_of(names: tuple[str, ...], current: str) -> Samples:
    return [((name,), float(name == current)) for name in names]


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _variance(values: list[float]) -> float:
    mean = _mean(values)
    return math.fsum((value - mean) ** 2 for value in values) / len(values)
