"""`sgt-ds report`: one run, or several side by side, as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from sgt_ds.cli.frame import Parser, Subparsers, add_command


def register(commands: Subparsers[Parser]) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "report",
        "Write a report on one run, or several side by side, as one self-contained HTML file.",
        "sgt-ds report runs/573m-sgt -o report.html\n"
        "  sgt-ds report runs/573m-vanilla runs/573m-sgt -o compared.html",
        write,
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="run directory; others are compared with the first",
    )
    parser.add_argument(
        "-o", "--out", type=Path, required=True, metavar="FILE", help="HTML file to write"
    )


def write(options: argparse.Namespace) -> None:
    """Write the report."""
    from sgt_ds.errors import HERE, UserError, refusal
    from sgt_ds.files import output_writer
    from sgt_ds.report import MAX_RUNS, html_report, read_histories

    if len(options.runs) > MAX_RUNS:
        message = f"{len(options.runs)} runs are too many to tell apart; give at most {MAX_RUNS}"
        raise UserError(HERE, "RUN", message)
    text = html_report(read_histories(options.runs))
    try:
        with output_writer(options.out) as stream:
            stream.write(text.encode())
    except OSError as error:
        message = refusal(error, "written", instead="name another file")
        raise UserError(options.out, "--out", message) from None
    print(f"{options.out}: {len(text.encode()) / 1024:,.0f} KiB")
