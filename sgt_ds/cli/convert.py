"""`sgt-ds convert`: from a checkpoint to a folder that `transformers` loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from sgt_ds.cli.frame import Parser, Subparsers, add_command, keep_deepspeed_quiet, print_json
from sgt_ds.progress import counted


def register(commands: Subparsers[Parser]) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "convert",
        "Convert a checkpoint to a Hugging Face folder (LLaMA, or SGT with its own model file).",
        "sgt-ds convert runs/573m-sgt --out exports/573m-sgt --dtype bf16",
        run,
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT_DIR",
        help="a run directory, its checkpoints, or one checkpoint",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--tag", metavar="T", help="name or step of the checkpoint (default: the newest)"
    )
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32", "fp16"), default="bf16", help="dtype of the weights"
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="largest size of a weight file"
    )
    parser.add_argument(
        "--trim-vocab",
        action="store_true",
        help="drop the rows that pad the vocabulary (default: keep them)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer to use instead of the run's; `none` exports without one",
    )
    parser.add_argument("--json", action="store_true", help="print a report as JSON")


def run(options: argparse.Namespace) -> None:
    """Convert and report."""
    keep_deepspeed_quiet()
    from sgt_ds.inference import convert

    report = convert(
        options.checkpoint,
        options.out,
        tag=options.tag,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        trim_vocab=options.trim_vocab,
        tokenizer=options.tokenizer,
    )
    if options.json:
        print_json(report)
        return
    print(
        f"{report['out']}: {report['model_type']}, {report['parameters']:,} parameters in "
        f"{report['dtype']}, step {report['step']} of {report['method']}, "
        f"{counted(len(report['loops']), 'looping layer')}, {report['bytes'] / 1e6:,.1f} MB in "
        f"{counted(len(report['files']), 'file')}, checked against "
        f"{counted(report['world_size'], 'partition')}"
    )
    if report["entering"]:
        print("a loop was entering at this step; its factors are in config.json")
    if not report["tokenizer"]:
        print("exported without a tokenizer: the run names none, or --tokenizer none was given")
