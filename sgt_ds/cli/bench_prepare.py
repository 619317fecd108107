"""`sgt-ds bench prepare`: preparation compared with the bare tokenizer and datatrove."""

from __future__ import annotations

import argparse
from pathlib import Path

from sgt_ds.cli.frame import Parser, Subparsers, add_command, print_json, whole_number
from sgt_ds.progress import counted


def register(group: Subparsers[Parser]) -> None:
    """Add the command."""
    parser = add_command(
        group,
        "prepare",
        "Compare data preparation with the bare tokenizer's batch encode on the same documents.",
        "sgt-ds bench prepare 'c4/en/*.json.gz' --tokenizer tokenizer.json --workers 2",
        prepare,
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="C4 files, globs or URLs")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        required=True,
        metavar="FILE",
        help="tokenizer, as for data prepare",
    )
    parser.add_argument(
        "--workers", type=whole_number(2), default=2, help="processes to compare with one"
    )
    parser.add_argument("--rounds", type=whole_number(1), default=5, help="rounds over all cases")
    parser.add_argument(
        "--text-bytes",
        type=whole_number(1),
        default=16_000_000,
        metavar="B",
        help="bytes of text to read",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def prepare(options: argparse.Namespace) -> None:
    """Measure and print."""
    from sgt_ds.data import bench_prepare

    bench = bench_prepare(
        options.inputs,
        options.tokenizer,
        text_bytes=options.text_bytes,
        workers=options.workers,
        rounds=options.rounds,
    )
    if options.json:
        print_json(bench.as_json())
        return
    print(
        f"{counted(bench.documents, 'document')}, {bench.text_bytes / 1e6:.1f} MB of text, "
        f"{bench.tokens:,} tokens, mean of {counted(bench.rounds, 'round')}"
    )
    print(f"{'case':30}{'seconds':>9}{'CPU s':>9}{'tokens/CPU s':>14}{'documents/CPU s':>17}")
    for name, seconds in bench.seconds.items():
        print(
            f"{name:30}{seconds:9.2f}{bench.cpu_seconds[name]:9.2f}"
            f"{bench.tokens_per_cpu_second[name]:14,.0f}"
            f"{bench.documents_per_cpu_second[name]:17,.0f}"
        )
    fast = bench.per_core_ratio_fast
    print(
        f"one core reaches {bench.per_core_ratio:.3f} of the bare batch encode"
        + (f", {fast:.3f} of the one without offsets" if fast else "")
        + (f", {bench.peer_ratio:.2f} times datatrove" if bench.peer_ratio else "")
        + f"; {bench.workers} workers {bench.speedup_cpu_ratio:.2f} of one by CPU time, "
        f"{bench.speedup_ratio:.2f} by the clock"
    )
