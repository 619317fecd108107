"""`sgt-ds stop`: ask a run to save and exit; kill only its own processes if it does not."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sgt_ds.cli.frame import Parser, Subparsers, add_command, real_number


def register(commands: Subparsers[Parser]) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "stop",
        "Ask a run to save and exit; kill only its own processes if it does not (under the raw "
        "launcher, only ask).",
        "sgt-ds stop runs/573m-sgt",
        stop_run,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "--grace",
        type=real_number(0, 1e6),
        default=120.0,
        metavar="SECONDS",
        help="time to save and exit before the processes are killed",
    )


def stop_run(options: argparse.Namespace) -> None:
    """Stop the run and say what happened."""
    from sgt_ds.launch import stop

    def say(text: str) -> None:
        print(f"sgt-ds stop: {text}", file=sys.stderr, flush=True)

    print(stop(options.run_dir, grace_seconds=options.grace, say=say))
