"""`sgt-ds top`: a run in the terminal."""

from __future__ import annotations

import argparse

from sgt_ds.cli.frame import Parser, Subparsers, add_command, real_number


def register(commands: Subparsers[Parser]) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "top",
        "Show a run in the terminal: phase, loss, entropies, loops, time left.",
        "sgt-ds top runs/573m-sgt\n  sgt-ds top node1:9400 --once",
        show,
    )
    parser.add_argument(
        "run", metavar="RUN|HOST:PORT", help="run directory, or the exporter of its rank 0"
    )
    parser.add_argument("--once", action="store_true", help="print once and end")
    parser.add_argument(
        "--every",
        type=real_number(0.1, 3600),
        default=2.0,
        metavar="SECONDS",
        help="time between two looks (default: 2)",
    )


def show(options: argparse.Namespace) -> None:
    """Print the view once, or again and again until interrupted."""
    import shutil
    import sys
    import time

    from sgt_ds.errors import SgtError, UserError
    from sgt_ds.report import open_source, render

    source = open_source(options.run)
    plain = "utf" not in (sys.stdout.encoding or "").lower()
    if options.once:
        print(render(source.read(), plain=plain), end="")
        return
    if not sys.stdout.isatty():
        raise UserError("sgt-ds top", "--once", "is needed where stdout is no terminal; add it")
    view, trouble = source.read(), ""
    try:
        while True:
            columns = shutil.get_terminal_size().columns
            text = render(view, min(columns, 160), plain=plain) + trouble
            # Home, the text with the rest of each line cleared, then everything below cleared.
            lines = text.replace("\n", "\x1b[K\n")
            print(f"\x1b[H{lines}\x1b[J", end="", flush=True)
            time.sleep(options.every)
            try:
                view, trouble = source.read(), ""
            except SgtError as error:  # a run that restarts: what it was stays in view
                trouble = f"\n{str(error)[:columns]}\n"
    except KeyboardInterrupt:
        print()
