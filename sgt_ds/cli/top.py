"""`sgt-ds top`: a run in the terminal."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from sgt_ds.cli.frame import Parser, Subparsers, add_command, real_number
from sgt_ds.errors import SgtError, UserError, refusal

if TYPE_CHECKING:
    from sgt_ds.report import Access

PASSWORD_VARIABLE = "SGT_PASSWORD"


def register(commands: Subparsers[Parser]) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "top",
        "Show a run in the terminal: phase, loss, entropies, loops, time left.",
        "sgt-ds top runs/573m-sgt\n  sgt-ds top node1:9400 --once\n"
        "  sgt-ds top https://node1:9400 --ca-file tls/ca.pem --user sgt --password-file "
        "tls/password",
        show,
    )
    parser.add_argument(
        "run", metavar="RUN|HOST:PORT", help="run directory, or the exporter of its rank 0"
    )
    parser.add_argument("--once", action="store_true", help="print once and exit")
    parser.add_argument(
        "--every",
        type=real_number(0.1, 3600),
        default=2.0,
        metavar="SECONDS",
        help="refresh interval (default: 2)",
    )
    asked = parser.add_argument_group(
        "credentials that the exporters require (a run directory supplies its own)"
    )
    asked.add_argument(
        "--ca-file",
        type=Path,
        metavar="PEM",
        help="PEM authority that signed the exporters' certificates",
    )
    asked.add_argument("--cert", type=Path, metavar="PEM", help="client certificate")
    asked.add_argument("--key", type=Path, metavar="PEM", help="private key of --cert")
    asked.add_argument("--user", metavar="NAME", help="user name for basic authentication")
    asked.add_argument(
        "--password-file",
        type=Path,
        metavar="FILE",
        help=f"file whose first line is the password (default: the variable {PASSWORD_VARIABLE})",
    )


def show(options: argparse.Namespace) -> None:
    """Print the view once, or again and again until interrupted."""
    import shutil
    import sys
    import time

    from sgt_ds.report import open_source, render

    source = open_source(options.run, _access(options))
    plain = "utf" not in (sys.stdout.encoding or "").lower()
    if options.once:
        print(render(source.read(), plain=plain), end="")
        return
    if not sys.stdout.isatty():
        raise UserError("--once", None, "is required if stdout is not a terminal; add it")
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


def _access(options: argparse.Namespace) -> Access:
    from sgt_ds.report import Access
    from sgt_ds.telemetry import read_password

    if options.key is not None and options.cert is None:
        raise UserError("--key", None, "requires --cert; give both")
    password, file = os.environ.get(PASSWORD_VARIABLE), options.password_file
    if file is not None:
        try:
            password = read_password(file)
        except (OSError, ValueError) as error:
            raise UserError(file, None, refusal(error, "read", "give a text file")) from None
    if options.user is not None and not password:
        message = f"requires --password-file, or the variable {PASSWORD_VARIABLE}; give one"
        raise UserError("--user", None, message)
    if options.user is None and file is not None:
        raise UserError("--password-file", None, "requires --user; give it too")
    return Access(
        ca_file=options.ca_file,
        certificate=options.cert,
        private_key=options.key,
        username=options.user,
        password=password,
    )
