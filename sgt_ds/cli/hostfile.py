"""`sgt-ds hostfile check`: read a hostfile as strictly as `sgt-ds train` does."""

from __future__ import annotations

import argparse
from pathlib import Path

from sgt_ds.cli.frame import Parser, Subparsers, add_command, add_group, print_json


def register(commands: Subparsers[Parser]) -> None:
    """Add the command."""
    group = add_group(commands, "hostfile", "Check the list of machines to train on.")
    parser = add_command(
        group,
        "check",
        "Check a hostfile and print what it means.",
        "sgt-ds hostfile check hostfiles/cluster",
        check,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="hostfile")
    parser.add_argument("--json", action="store_true", help="print JSON")


def check(options: argparse.Namespace) -> None:
    """Print hosts, slots and the number of ranks."""
    from sgt_ds.launch import parse_hostfile, world_size

    hosts = parse_hostfile(options.file)
    if options.json:
        print_json(
            {
                "hosts": [{"name": host.name, "slots": host.slots} for host in hosts],
                "world_size": world_size(hosts),
            }
        )
        return
    for host in hosts:
        print(f"{host.name}  {host.slots} ranks")
    print(f"{len(hosts)} hosts, {world_size(hosts)} ranks")
