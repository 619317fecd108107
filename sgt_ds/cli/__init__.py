"""The `sgt-ds` command: one thin module per verb. `--help` imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from sgt_ds import __version__
from sgt_ds.cli.frame import Parser, run_command

# In the order in which a user meets them.
VERBS = (
    "config",
    "tokenizer",
    "data",
    "plan",
    "hostfile",
    "train",
    "stop",
    "top",
    "report",
    "monitor",
    "bench",
    "growth",
    "checkpoint",
    "convert",
    "import_",
    "generate",
    "eval",
)

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 success, 1 a failed run, 2 bad usage or input."""
    parser = Parser(
        prog="sgt-ds",
        description="Pre-train LLaMA-style models with DeepSpeed, and grow them while they train.",
    )
    parser.add_argument("--version", action="version", version=f"sgt-ds {__version__}")
    commands = parser.add_subparsers(
        dest="verb", required=True, metavar="COMMAND", parser_class=Parser
    )
    for verb in VERBS:
        importlib.import_module(f"sgt_ds.cli.{verb}").register(commands)
    return run_command(parser, arguments)
