"""`sgt-ds growth rollback`: continue from an earlier checkpoint, optionally with frozen growth."""

from __future__ import annotations

import argparse
from pathlib import Path

from sgt_ds.cli.frame import Parser, Subparsers, add_command, print_json, whole_number


def add_rollback(group: Subparsers[Parser]) -> None:
    """Add the command."""
    parser = add_command(
        group,
        "rollback",
        "Make a finished run resume from an earlier checkpoint; later ones are set aside.",
        "sgt-ds growth rollback runs/573m-sgt --to 1000 --freeze",
        rollback,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "--to",
        type=whole_number(),
        required=True,
        metavar="STEP",
        help="resume from the newest good checkpoint at or before this step",
    )
    parser.add_argument(
        "--freeze", action="store_true", help="freeze growth from there on, like growth freeze"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def rollback(options: argparse.Namespace) -> None:
    """Set aside, and say what happened."""
    from sgt_ds.config import RunLayout
    from sgt_ds.errors import UserError
    from sgt_ds.growth import request_freeze
    from sgt_ds.launch import check_unattended, supervision
    from sgt_ds.training import roll_back

    run, layout = options.run, RunLayout(options.run)
    if not layout.config.exists():
        raise UserError(run, None, "is not a run directory; give the run_dir of a run")
    with supervision(run):
        check_unattended(run)
        done = roll_back(run, options.to)
        if options.freeze:
            request_freeze(run)
    asked = layout.freeze_request.exists()
    if options.json:
        print_json(
            {
                "step": done.step,
                "checkpoint": str(done.checkpoint),
                "set_aside": None if done.set_aside is None else str(done.set_aside),
                "moved": [path.name for path in done.moved],
                "frozen": asked or done.frozen_from is not None,
            }
        )
        return
    print(f"{run} resumes from step {done.step}: {done.checkpoint}")
    if done.set_aside is None and done.cut:
        print("an earlier rollback set aside what came later; journal and metrics are cut now")
    elif done.set_aside is None:
        beyond = f": the run has not reached step {options.to}" if options.to > done.step else ""
        print(f"nothing to set aside{beyond}")
    else:
        names = ", ".join(path.name for path in done.moved) or "no checkpoint"
        print(f"set aside in {done.set_aside}: {names}; with journal and metrics as they were")
    if done.frozen_from is not None:
        print(
            f"growth has been frozen since step {done.frozen_from}; roll back to before it to "
            "let it grow"
        )
    elif asked:
        print(
            f"growth is frozen from there on; to let it grow again, remove {layout.freeze_request}"
        )
    elif done.thawed:
        print("the later freeze is undone: growth continues")
