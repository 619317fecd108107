"""An update and a scrape in which every metric has a value: for counting series and benchmarks."""

from __future__ import annotations

import math

from sgt_ds.growth import Loop, State
from sgt_ds.telemetry.hardware import Hardware
from sgt_ds.telemetry.metric import MARGIN_KINDS, RULES, STALL_REASONS
from sgt_ds.telemetry.record import StepRecord
from sgt_ds.telemetry.snapshot import DeviceMemory, Snapshot

LOOPING_LAYERS = 3


def full_record(num_layers: int, num_heads: int) -> StepRecord:
    """A logged update in which every value is there, and whole layers loop."""
    looping = range(num_layers - min(num_layers, LOOPING_LAYERS), num_layers)
    whole = Loop(depth=1, heads=None, scope="attention", step=0, entered=0)
    return StepRecord(
        step=1,
        tokens=1,
        loss=math.log(50280),
        learning_rate=6e-4,
        grad_norm=1.0,
        step_seconds=1.0,
        tokens_per_second=1.0,
        flops=1,
        vanilla_flops=1,
        overhead_ratio=0.0,
        flops_per_token=1,
        mfu_ratio=0.5,
        data_wait_seconds=0.0,
        skipped_steps=0,
        phase="growing",
        loops=State(dict.fromkeys(looping, whole)),
        entropy=[[0.5] * num_heads] * num_layers,
        layer_stderr=[0.01] * num_layers,
        source_tokens={"shards/c4": 1},
        planned_overhead_ratio=0.0,
    )


def full_snapshot(num_layers: int, num_heads: int, *, run_wide: bool, host_wide: bool) -> Snapshot:
    """A snapshot in which every metric has a value, and whole layers loop."""
    record = full_record(num_layers, num_heads)
    return Snapshot(
        rank=0,
        run_wide=run_wide,
        host_wide=host_wide,
        num_layers=num_layers,
        num_heads=num_heads,
        info={},
        step_timestamp=0.0,
        record=record,
        totals=record.totals,
        run_steps=1,
        checkpoint_steps=1,
        validation_loss=1.0,
        evaluation={"arc_easy": {"acc": 0.5}},
        growth_events=dict.fromkeys(RULES, 0),
        growth_stalls=dict.fromkeys(STALL_REASONS, 0),
        growth_margin=dict.fromkeys(MARGIN_KINDS, 3.0),
        within_noise=False,
        checkpoint_seconds=1.0,
        load_seconds=1.0,
        checkpoint_timestamp=0.0,
        device_memory=DeviceMemory(allocated=1, reserved=1, peak=1, size=1),
        hardware=Hardware(1, 1, 1, 1, 1, 1, 0.5, 300.0, 1.0),
    )
