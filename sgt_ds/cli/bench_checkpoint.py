"""`sgt-ds bench checkpoint`: how long training stands still for a checkpoint on this machine."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from sgt_ds.cli.frame import Parser, Subparsers, add_command, print_json, whole_number
from sgt_ds.config import PRESETS
from sgt_ds.errors import UserError


def register(group: Subparsers[Parser]) -> None:
    """Add the command to the group `bench`."""
    parser = add_command(
        group,
        "checkpoint",
        "Time a checkpoint that is waited for beside one that is written while training goes on.",
        "sgt-ds bench checkpoint --preset demo --scratch runs",
        checkpoint,
    )
    parser.add_argument("--preset", choices=list(PRESETS), default="demo", help="model shape")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of the weights")
    parser.add_argument("--micro-batch-size", type=whole_number(1), default=4, help="sequences")
    parser.add_argument(
        "--seq-len", type=whole_number(1), default=64, help="positions of a sequence"
    )
    parser.add_argument(
        "--rounds", type=whole_number(1), default=5, help="checkpoints of each kind"
    )
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR", help="on the disk to measure (default: temporary)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def checkpoint(options: argparse.Namespace) -> None:
    """Measure and print."""
    if options.scratch is not None and not options.scratch.is_dir():
        raise UserError("--scratch", None, f"{options.scratch} is no folder; make it first")
    # DeepSpeed logs to what stdout is at its import: keep it out of --json.
    with contextlib.redirect_stdout(sys.stderr):
        from sgt_ds.training import bench_saving

        bench = bench_saving(
            PRESETS[options.preset],
            dtype=options.dtype,
            rounds=options.rounds,
            micro_batch_size=options.micro_batch_size,
            sequence_length=options.seq_len,
            scratch=options.scratch,
        )
    if options.json:
        print_json({"preset": options.preset, **bench.as_json()})
        return
    print(
        f"{options.preset}: {bench.parameters:,} parameters, {bench.dtype}, {bench.device} "
        f"({bench.threads} threads), a checkpoint of {bench.checkpoint_bytes / 1e6:,.0f} MB, "
        f"medians of {bench.rounds} rounds"
    )
    print(f"written at once        {bench.at_once_seconds:8.3f} s, all of it a stall")
    print(
        f"written beside         {bench.written_seconds:8.3f} s, of which a stall "
        f"{bench.stall_seconds:.3f} s (the first time {bench.first_stall_seconds:.3f} s)"
    )
    print(f"stall ratio            {bench.stall_ratio:8.3f}")
    beside = bench.step_beside_seconds
    print(
        f"an update              {bench.step_seconds:8.3f} s alone"
        + (f", {beside:.3f} s while one is written" if beside is not None else "")
    )
