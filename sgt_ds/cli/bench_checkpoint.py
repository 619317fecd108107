"""`sgt-ds bench checkpoint`: how long a checkpoint pauses training on this machine."""

from __future__ import annotations

import argparse
import contextlib
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from sgt_ds.cli.frame import Parser, Subparsers, add_command, print_json, whole_number
from sgt_ds.config import PRESETS
from sgt_ds.errors import UserError
from sgt_ds.progress import counted

if TYPE_CHECKING:
    from sgt_ds.training import SavingBench


def register(group: Subparsers[Parser]) -> None:
    """Add the command to the group `bench`."""
    parser = add_command(
        group,
        "checkpoint",
        "Compare a blocking checkpoint with one that is written while training continues.",
        "sgt-ds bench checkpoint --preset demo --scratch runs",
        checkpoint,
    )
    parser.add_argument("--preset", choices=list(PRESETS), default="demo", help="model shape")
    parser.add_argument(
        "--dtype", choices=["fp32", "bf16"], default="fp32", help="dtype of the weights"
    )
    parser.add_argument(
        "--micro-batch-size", type=whole_number(1), default=4, help="sequences per forward pass"
    )
    parser.add_argument("--seq-len", type=whole_number(1), default=64, help="sequence length")
    parser.add_argument(
        "--rounds", type=whole_number(1), default=5, help="checkpoints of each kind"
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="DIR",
        help="directory on the disk to measure (default: a temporary one)",
    )
    parser.add_argument(
        "--threads",
        type=whole_number(1),
        nargs="+",
        default=[1, 2],
        metavar="N",
        help="torch threads; each value runs in its own process (default: 1 2)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def checkpoint(options: argparse.Namespace) -> None:
    """Measure and print."""
    if options.scratch is not None and not options.scratch.is_dir():
        raise UserError("--scratch", None, f"{options.scratch} is not a directory; create it first")
    benches = []
    for threads in options.threads:
        with (
            # The first save of a process is its only first one.
            ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
            # Reading its result imports DeepSpeed here, too.
            contextlib.redirect_stdout(sys.stderr),
        ):
            benches.append(pool.submit(_measure, options, threads).result())
    if options.json:
        print_json({"preset": options.preset, "by_threads": [one.as_json() for one in benches]})
        return
    for bench in benches:
        _print(options.preset, bench)


def _measure(options: argparse.Namespace, threads: int) -> SavingBench:
    sys.stdout = sys.stderr  # DeepSpeed logs to what stdout is at its import: keep it out of --json
    from sgt_ds.training import bench_saving

    return bench_saving(
        PRESETS[options.preset],
        threads=threads,
        dtype=options.dtype,
        rounds=options.rounds,
        micro_batch_size=options.micro_batch_size,
        sequence_length=options.seq_len,
        scratch=options.scratch,
    )


def _print(preset: str, bench: SavingBench) -> None:
    threads = counted(bench.threads, "thread")
    print(
        f"{preset}: {bench.parameters:,} parameters, {bench.dtype}, {bench.device}, {threads}, "
        f"a checkpoint of {bench.checkpoint_bytes / 1e6:,.0f} MB, medians of "
        f"{counted(bench.rounds, 'round')}"
    )
    print(f"blocking                  {bench.at_once_seconds:8.3f} s, all of it a stall")
    for which, stall, ratio in (
        ("first save", bench.first_stall_seconds, bench.first_stall_ratio),
        ("later saves", bench.stall_seconds, bench.stall_ratio),
    ):
        print(f"background, {which:<13} {stall:8.3f} s of a stall, {ratio:.3f} of blocking")
    print(f"background, until written {bench.written_seconds:8.3f} s")
    beside = bench.step_beside_seconds
    print(
        f"an update                 {bench.step_seconds:8.3f} s alone"
        + (f", {beside:.3f} s while one is being written" if beside is not None else "")
    )
