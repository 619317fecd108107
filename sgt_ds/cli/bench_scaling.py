"""`sgt-ds bench scaling`: whole runs on increasing numbers of ranks, weak and strong."""

from __future__ import annotations

import argparse

from sgt_ds.cli.bench_train import (
    MAX_RANKS,
    add_run_options,
    measure,
    measure_collectives,
    print_table,
    roofline_of,
    setting_of,
    to_measure,
)
from sgt_ds.cli.frame import Parser, Subparsers, add_command, print_json, whole_number

VARIANTS = ["vanilla", "sgt:3"]


def register(group: Subparsers[Parser]) -> None:
    """Add the command to the group `bench`."""
    parser = add_command(
        group,
        "scaling",
        "Time whole runs on increasing numbers of ranks: weak scaling, and strong scaling on "
        "request.",
        "sgt-ds bench scaling run.yaml --gpus 1,2,4,8 --micro-batches 8 --global-batch 1024",
        scaling,
    )
    parser.add_argument(
        "--gpus",
        dest="num_gpus",
        type=_numbers,
        default=[1, 2],
        metavar="N,N,…",
        help="numbers of ranks, ascending (default: 1,2)",
    )
    parser.add_argument(
        "--global-batch",
        type=whole_number(1),
        metavar="G",
        help="also measure strong scaling with this many sequences per update",
    )
    add_run_options(parser, VARIANTS)


def scaling(options: argparse.Namespace) -> None:
    """Measure and print."""
    from sgt_ds.launch import ending_on_sigterm, scratch_for

    kinds = {"weak": None, "strong": options.global_batch}
    settings = {
        kind: setting_of(options, batch)
        for kind, batch in kinds.items()
        if batch is not None or kind == "weak"
    }
    measured = {kind: to_measure(setting) for kind, setting in settings.items()}
    with ending_on_sigterm():
        try:
            with scratch_for(options.scratch) as scratch:
                roofline = roofline_of(measured["weak"], scratch)
                for one in measured.values():
                    one.roofline = roofline
                for kind, setting in settings.items():
                    measure(setting, measured[kind], scratch / kind)
                if options.json:
                    measure_collectives(settings["weak"], measured["weak"], scratch / "weak")
        finally:
            if options.json and measured["weak"].figures:
                print_json({kind: one.as_json() for kind, one in measured.items()})
            elif not options.json:
                for kind, one in measured.items():
                    if one.figures:
                        print(f"{kind} scaling")
                        print_table(settings[kind], one)


def _numbers(text: str) -> list[int]:
    number = whole_number(1, MAX_RANKS)
    numbers = sorted(number(part) for part in text.split(","))
    if len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"'{text}' names one twice")
    return numbers
