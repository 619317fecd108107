"""`sgt-ds import`: from a Hugging Face LLaMA to a training start."""

from __future__ import annotations

import argparse
from pathlib import Path

from sgt_ds.cli.frame import (
    Parser,
    Subparsers,
    add_command,
    keep_deepspeed_quiet,
    print_json,
    whole_number,
)


def register(commands: Subparsers[Parser]) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "import",
        "Turn a LLaMA-architecture model into starting weights (set as `init` of a run).",
        "sgt-ds import models/smollm2-135m --out starts/smollm2-135m",
        run,
    )
    parser.add_argument(
        "directory",
        type=Path,
        metavar="HF_DIR",
        help="folder with config.json and safetensors of a LLaMA",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--vocab-size",
        type=whole_number(1),
        metavar="V",
        help="number of tokenizer ids, if the model's rows are padded (default: as many as "
        "the folder's tokenizer has, if its ids fit the rows, else all rows)",
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="largest size of a weight file"
    )
    parser.add_argument("--json", action="store_true", help="print a report as JSON")


def run(options: argparse.Namespace) -> None:
    """Import and report."""
    keep_deepspeed_quiet()
    from sgt_ds.inference import import_model

    report = import_model(
        options.directory,
        options.out,
        vocab_size=options.vocab_size,
        max_shard_size=options.max_shard_size,
    )
    if options.json:
        print_json(report)
        return
    print(f"{report['out']}: {report['parameters']:,} parameters, float32")
    if report["untied"]:
        print("embedding and output matrix are shared in the source and separate from here on")
    if report["repeated_key_value_heads"] > 1:
        print(
            f"each key-value head is repeated {report['repeated_key_value_heads']} times: the "
            "same function, with as many key-value heads as heads"
        )
    if report["padding_rows"]:
        ids = report["model"]["vocab_size"]
        print(f"{report['padding_rows']} rows pad the vocabulary of {ids:,} ids")
    print(f"in RUN.yaml (also in {Path(report['out']) / 'model.yaml'}):")
    print((Path(report["out"]) / "model.yaml").read_text(encoding="utf-8"), end="")
