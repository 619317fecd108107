"""`sgt-ds generate`: text from an export."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sgt_ds.cli.frame import (
    Parser,
    Subparsers,
    add_command,
    print_json,
    real_number,
    warn,
    whole_number,
)
from sgt_ds.errors import UserError, refusal


def register(commands: Subparsers[Parser]) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "generate",
        "Complete prompts with an exported model.",
        "sgt-ds generate exports/573m-sgt --prompt 'Once upon a time' --temperature 0.8 --stream",
        run,
    )
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="folder written by `sgt-ds convert`"
    )
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument(
        "--prompt", metavar="TEXT", action="append", help="text to complete; may be repeated"
    )
    given.add_argument(
        "--prompts", metavar="FILE", type=Path, help="file with one prompt per line; - for stdin"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=whole_number(1, 10**6),
        metavar="N",
        help="maximum number of new tokens per prompt (default: 64, or as many as the positions "
        "that the model was trained on leave)",
    )
    parser.add_argument(
        "--temperature",
        type=real_number(0, 100),
        default=0.0,
        metavar="T",
        help="sampling temperature; 0 always picks the most likely token",
    )
    parser.add_argument(
        "--top-p",
        type=real_number(0, 1),
        default=1.0,
        metavar="P",
        help="nucleus sampling threshold; 1 keeps all tokens",
    )
    parser.add_argument(
        "--top-k",
        type=whole_number(),
        default=0,
        metavar="K",
        help="sample from the K most likely tokens; 0 keeps all",
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0, 2**63 - 1),
        default=0,
        metavar="S",
        help="random seed",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that ends a completion; may be repeated",
    )
    parser.add_argument(
        "--batch-size",
        type=whole_number(1, 10**6),
        default=8,
        metavar="N",
        help="prompts per batch",
    )
    parser.add_argument(
        "--device", metavar="D", help="cpu, cuda, cuda:1 (default: a GPU if there is one)"
    )
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="dtype of the weights (default: as in the export; fp32 on a CPU)",
    )
    parser.add_argument("--stream", action="store_true", help="print text as it is generated")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> None:
    """Load, complete, print."""
    if options.stream and options.json:
        raise UserError("--stream", None, "cannot be combined with --json; choose one")
    prompts = options.prompt if options.prompt is not None else _read_prompts(options.prompts)
    from sgt_ds.inference import Sampling, TextGenerator, usable_device

    usable_device(options.device)
    sampling = Sampling(
        options.max_new_tokens,
        options.temperature,
        options.top_p,
        options.top_k,
        options.seed,
        tuple(options.stop),
    )
    text_generator = TextGenerator(options.directory, device=options.device, dtype=options.dtype)
    warn("generate", text_generator.warnings(prompts, sampling))
    if options.stream:
        completions = text_generator.complete(prompts, sampling, on_text=_print_piece)
        for prompt in prompts:
            print(prompt, end="", flush=True)
            next(completions)
            print(flush=True)
        return
    completions = text_generator.complete(prompts, sampling, batch_size=options.batch_size)
    if options.json:
        print_json({"completions": [completion.as_json() for completion in completions]})
        return
    for completion in completions:
        print(completion.prompt + completion.text, flush=True)


def _print_piece(text: str) -> None:
    print(text, end="", flush=True)


def _read_prompts(path: Path) -> list[str]:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(path, None, refusal(error, "read", "give a text file")) from None
    # Not `splitlines`: a line separator of Unicode's belongs to the text.
    lines = text.replace("\r\n", "\n").split("\n")
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UserError(path, None, "holds no prompt; write one per line")
    return prompts
