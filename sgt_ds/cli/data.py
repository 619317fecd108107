"""`sgt-ds data`: prepare, verify and inspect token shards."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from sgt_ds.cli.frame import (
    Parser,
    Subparsers,
    add_command,
    add_group,
    print_json,
    real_number,
    whole_number,
)
from sgt_ds.errors import SgtError
from sgt_ds.progress import counted


class Interrupted(SgtError):
    """Ended by Ctrl-C, as the shell tells it, with something to say about it."""

    exit_code = 130


def register(commands: Subparsers[Parser]) -> None:
    """Add the commands."""
    group = add_group(commands, "data", "Prepare, verify and inspect token shards.")
    _register_prepare(group)
    parser = add_command(
        group,
        "verify",
        "Read a prepared set and report every file that is missing, unexpected, truncated or "
        "changed.",
        "sgt-ds data verify shards/c4",
        verify_set,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="prepared set")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser = add_command(
        group,
        "inspect",
        "Show a prepared set's counts, document lengths and one decoded document.",
        "sgt-ds data inspect shards/c4 --sample 17",
        inspect_set,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="prepared set")
    parser.add_argument(
        "--sample",
        type=whole_number(),
        default=0,
        metavar="N",
        help="document to decode (default: 0)",
    )
    parser.add_argument(
        "--sample-tokens",
        type=whole_number(),
        default=200,
        metavar="N",
        help="tokens of it to show (default: 200)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _register_prepare(group: Subparsers[Parser]) -> None:
    parser = add_command(
        group,
        "prepare",
        "Turn C4 files into token shards; after an interruption the same command continues.",
        "sgt-ds data prepare 'c4/en/*.json.gz' --tokenizer tokenizer.json --out shards/c4",
        prepare_set,
    )
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="files, globs or URLs (.json, .gz, .zst)")
    add("--tokenizer", type=Path, required=True, metavar="FILE",
        help="Hugging Face tokenizers JSON, or SentencePiece .model")  # fmt: skip
    add("--out", type=Path, required=True, metavar="DIR", help="directory of the set to write")
    add("--workers", type=whole_number(), default=0, metavar="N",
        help="worker processes; 0 (default): one per core; mpirun -n N starts its own")  # fmt: skip
    add("--holdout", type=real_number(0, 1), default=0.0, metavar="SHARE",
        help="share of the documents held out for a second set, chosen by a hash of their "
        "text")  # fmt: skip
    add("--holdout-out", type=Path, metavar="DIR", help="directory of that second set")
    add(
        "--eos",
        metavar="TOKEN",
        help="token that ends a document, if the tokenizer file does not say",
    )
    add("--bos", action="store_true", help="put a BOS before each document too")
    add("--special-tokens", action="store_true",
        help="parse special tokens spelled out in the text (default: treat them as "
        "text)")  # fmt: skip
    add("--max-document-bytes", type=whole_number(1), default=4_000_000, metavar="B",
        help="count larger documents as damaged (default: 4 MB; a tokenizer needs ~100 times "
        "this)")  # fmt: skip
    add("--shard-tokens", type=whole_number(1), default=1 << 28, metavar="N",
        help="start a new shard after this many tokens of a file (default: 2^28)")  # fmt: skip
    add("--on-error", choices=("stop", "skip"), default="stop",
        help="on a damaged document or file: stop (default), or skip and list it")  # fmt: skip
    add("--max-bad-fraction", type=real_number(0, 1), default=0.001, metavar="F",
        help="with skip: fail if more than this share is damaged (default: 0.001)")  # fmt: skip
    add("--json", action="store_true", help="print JSON")


def prepare_set(options: argparse.Namespace) -> None:
    """Prepare and report."""
    from sgt_ds.data import Preparation, prepare
    from sgt_ds.errors import UserError

    if options.holdout == 1:
        raise UserError("--holdout", None, "leaves no document to train on; give less than 1")
    preparation = Preparation(
        inputs=tuple(options.inputs),
        tokenizer=options.tokenizer,
        out=options.out,
        workers=options.workers or len(os.sched_getaffinity(0)),
        holdout=options.holdout,
        holdout_out=options.holdout_out,
        eos=options.eos,
        bos=options.bos,
        special_tokens=options.special_tokens,
        max_document_bytes=options.max_document_bytes,
        shard_tokens=options.shard_tokens,
        on_error=options.on_error,
        max_bad_fraction=options.max_bad_fraction,
    )
    try:
        report = prepare(preparation)
    except KeyboardInterrupt:
        message = "interrupted; finished files are kept, and the same command continues"
        raise Interrupted(message) from None
    if report is None:  # a rank other than the first
        return
    if options.json:
        print_json(report.as_json())
    else:
        print(report.text())


def verify_set(options: argparse.Namespace) -> int:
    """Verify; exit status 2 where something is wrong."""
    from sgt_ds.data import verify
    from sgt_ds.errors import ALLOW_ACCESS, UserError

    faults = verify(options.directory)
    if options.json:
        print_json({"path": str(options.directory), "good": not faults, "faults": faults})
    elif not faults:
        print(f"{options.directory}: good")
    else:
        print("\n".join(faults))
    if faults:
        mended = all(fault.endswith(("; remove it", ALLOW_ACCESS)) for fault in faults)
        remedy = "" if mended else "; prepare the set again, or fetch those files again"
        count = f"{len(faults)} faults, first" if len(faults) > 1 else "one fault,"
        raise UserError(options.directory, None, f"{count} {faults[0]}{remedy}")
    return 0


def inspect_set(options: argparse.Namespace) -> None:
    """Show what a set holds."""
    from sgt_ds.data import inspect

    found = inspect(options.directory, sample=options.sample, sample_tokens=options.sample_tokens)
    if options.json:
        print_json(found)
        return
    tokenizer = found["tokenizer"]
    documents = counted(found["documents"], "document")
    print(f"{found['path']}: {documents} in {counted(found['shards'], 'shard')}")
    print(
        f"{found['tokens']:,} tokens ({found['dtype']}), "
        f"{found['characters_per_token']:.2f} characters a token"
    )
    print(
        f"tokenizer: {tokenizer['kind']}, {tokenizer['vocab_size']} ids, EOS {tokenizer['eos_id']}"
    )
    print("documents by length in tokens:")
    most = max(row["documents"] for row in found["document_lengths"])
    for row in found["document_lengths"]:
        bar = "#" * round(40 * row["documents"] / most)
        print(f"  {row['from']:>8}–{row['to']:<8} {row['documents']:>10,} {bar}")
    print(f"document {found['sample']['document']}:\n{found['sample']['text']}")
