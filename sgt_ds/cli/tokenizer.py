"""`sgt-ds tokenizer train`: a tokenizer from C4 files."""

from __future__ import annotations

import argparse
from pathlib import Path

from sgt_ds.cli.frame import (
    Parser,
    Subparsers,
    add_command,
    add_group,
    check_new,
    print_json,
    whole_number,
)


def register(commands: Subparsers[Parser]) -> None:
    """Add the commands."""
    group = add_group(commands, "tokenizer", "Train a tokenizer.")
    parser = add_command(
        group,
        "train",
        "Train a SentencePiece tokenizer (BPE with byte fallback) on C4 files.",
        "sgt-ds tokenizer train 'c4/en/*.json.gz' --vocab-size 32000 --out tokenizer.model",
        train,
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="C4 files, globs or URLs")
    parser.add_argument(
        "--vocab-size",
        type=whole_number(1, 10**6),
        required=True,
        metavar="V",
        help="number of ids",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="new model file")
    parser.add_argument(
        "--sample-bytes",
        type=whole_number(1),
        default=100_000_000,
        metavar="B",
        help="train on at most this much text, chosen by a hash of each document (default: 100 MB)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def train(options: argparse.Namespace) -> None:
    """Train and say what came of it."""
    from dataclasses import asdict

    from sgt_ds.data import train_tokenizer

    check_new("--out", options.out)
    trained = train_tokenizer(
        options.inputs, options.vocab_size, options.out, sample_bytes=options.sample_bytes
    )
    if options.json:
        print_json(asdict(trained))
    else:
        print(
            f"{trained.path}: {trained.vocab_size} ids from {trained.sampled_documents:,} of "
            f"{trained.documents:,} documents ({trained.sampled_bytes / 1e6:.1f} MB of text)"
        )
