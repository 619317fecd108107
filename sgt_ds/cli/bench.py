"""`sgt-ds bench`: measure speed and memory on this machine."""

from __future__ import annotations

from sgt_ds.cli import (
    bench_checkpoint,
    bench_data,
    bench_exporter,
    bench_forecast,
    bench_growth,
    bench_inference,
    bench_prepare,
    bench_scaling,
    bench_step,
    bench_train,
)
from sgt_ds.cli.frame import Parser, Subparsers, add_group


def register(commands: Subparsers[Parser]) -> None:
    """Add the group and its commands."""
    group = add_group(commands, "bench", "Measure speed and memory on this machine.")
    bench_step.register(group)
    bench_checkpoint.register(group)
    bench_data.register(group)
    bench_exporter.register(group)
    bench_inference.register(group)
    bench_prepare.register(group)
    bench_train.register(group)
    bench_growth.register(group)
    bench_scaling.register(group)
    bench_forecast.register(group)
