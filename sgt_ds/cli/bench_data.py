"""`sgt-ds bench data`: how fast training gets its tokens on this machine."""

from __future__ import annotations

import argparse

from sgt_ds.cli.frame import Parser, Subparsers, add_command, print_json, whole_number
from sgt_ds.progress import counted


def register(group: Subparsers[Parser]) -> None:
    """Add the command to the group `bench`."""
    parser = add_command(
        group,
        "data",
        "Time the loader, the global order and the opening of prepared sets, on sets it generates.",
        "sgt-ds bench data --json",
        data,
    )
    parser.add_argument(
        "--tokens",
        type=whole_number(1 << 20),
        default=1 << 25,
        help="tokens in the set that is read",
    )
    parser.add_argument(
        "--shards", type=whole_number(1), default=10_000, help="shards in the set that is opened"
    )
    parser.add_argument("--rounds", type=whole_number(1), default=5, help="rounds over all cases")
    parser.add_argument(
        "--ranks",
        type=whole_number(1, 256),
        default=1,
        help="ranks of the run; one process loads one rank's share",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def data(options: argparse.Namespace) -> None:
    """Measure and print."""
    from sgt_ds.data import bench_data

    bench = bench_data(
        tokens=options.tokens,
        shards=options.shards,
        rounds=options.rounds,
        ranks=options.ranks,
    )
    if options.json:
        print_json(bench.as_json())
        return
    print(
        f"median of {counted(bench.rounds, 'round')}, {bench.tokens:,} tokens, one process, the share of one "
        f"of {counted(bench.ranks, 'rank')}"
    )
    for row in bench.loader:
        print(
            f"loader, N = {row.sequence_length}"
            f"{', document starts' if row.document_starts else ''}: "
            f"{row.tokens_per_second / 1e6:.1f} M tokens/s, "
            f"{row.tokens_per_cpu_second / 1e6:.1f} M a CPU second, {row.ratio:.2f} of a bare copy"
        )
    print(
        f"permutation: {bench.permutation_indices_per_cpu_second / 1e6:.1f} M indices a CPU "
        "second, "
        f"{bench.permutation_ratio:.2f} of a shuffled table"
    )
    opening = bench.opening
    print(
        f"opening {opening['shards']:,} shards: {opening['seconds']:.2f} s, "
        f"{opening['cpu_seconds']:.2f} of CPU ({opening['seconds'] / opening['json_seconds']:.0f} "
        "times parsing the manifest), "
        f"{opening['memory_bytes'] / 1e6:.0f} MB more than before, "
        f"{opening['process_memory_bytes'] / 1e6:.0f} MB in all; a sequence of each: "
        f"{opening['read_each_shard_seconds']:.2f} s"
    )
