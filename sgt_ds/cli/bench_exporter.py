"""`sgt-ds bench exporter`: what metrics and scrapes cost a run on this machine."""

from __future__ import annotations

import argparse
import contextlib
import sys

from sgt_ds.cli.frame import Parser, Subparsers, add_command, print_json, whole_number
from sgt_ds.config import PRESETS
from sgt_ds.progress import counted


def register(group: Subparsers[Parser]) -> None:
    """Add the command to the group `bench`."""
    parser = add_command(
        group,
        "exporter",
        "Compare training with and without scrapes, and time publishing.",
        "sgt-ds bench exporter --scrapes 1000",
        exporter,
    )
    parser.add_argument("--preset", choices=list(PRESETS), default="demo", help="model to train")
    parser.add_argument(
        "--served", choices=list(PRESETS), default="573m", help="model whose series are served"
    )
    parser.add_argument(
        "--scrapes", type=whole_number(10), default=1000, help="minimum number of scrapes in all"
    )
    parser.add_argument(
        "--rounds", type=whole_number(2), default=20, help="rounds, each with and without scrapes"
    )
    parser.add_argument(
        "--micro-batch-size", type=whole_number(1), default=4, help="sequences per forward pass"
    )
    parser.add_argument("--seq-len", type=whole_number(1), default=128, help="sequence length")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def exporter(options: argparse.Namespace) -> None:
    """Measure and print."""
    import torch

    # DeepSpeed, which this package loads, logs to what stdout is at its import: keep it out of --json.
    with contextlib.redirect_stdout(sys.stderr):
        from sgt_ds.training import bench_exporter

    bench = bench_exporter(
        PRESETS[options.preset],
        PRESETS[options.served],
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        scrapes=options.scrapes,
        rounds=options.rounds,
        micro_batch_size=options.micro_batch_size,
        sequence_length=options.seq_len,
    )
    if options.json:
        print_json({"preset": options.preset, "served": options.served, **bench.as_json()})
        return
    low, high = bench.clock_ratio_quartiles
    print(
        f"{options.preset} on {bench.device}, {1000 * bench.step_seconds:.1f} ms a step; "
        f"{bench.series} series of {options.served}, {bench.scrape_bytes:,} bytes a scrape; "
        f"{counted(bench.scrapes, 'scrape')} in {counted(bench.rounds, 'round')}"
    )
    print(
        f"a scrape               {1000 * bench.cpu_seconds_per_scrape:8.2f} ms of CPU, "
        f"{100 * bench.ratio_at_interval:.4f}% of the time every {bench.interval_seconds:g} s"
    )
    print(
        f"step while scraped     {bench.clock_ratio:8.4f} of one without, at five scrapes per "
        f"second (quartiles {low:.4f}-{high:.4f})"
    )
    print(
        f"publishing an update   {1e6 * bench.publish_seconds:8.1f} us, "
        f"{100 * bench.publish_ratio:.4f}% of this step"
    )
