"""`sgt-ds hostfile check`: check a hostfile as strictly as `sgt-ds train`, and probe its hosts."""

from __future__ import annotations

import argparse
from pathlib import Path

from sgt_ds.cli.frame import Parser, Subparsers, add_command, add_group, print_json, whole_number
from sgt_ds.progress import counted


def register(commands: Subparsers[Parser]) -> None:
    """Add the command."""
    group = add_group(commands, "hostfile", "Check the list of machines to train on.")
    parser = add_command(
        group,
        "check",
        "Check a hostfile, and with --probe its hosts, and print how it is read.",
        "sgt-ds hostfile check hostfiles/cluster --probe --shared runs",
        check,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="hostfile")
    parser.add_argument(
        "--probe",
        action="store_true",
        help="query every host by ssh: versions, GPUs, clock, free ports, shared directory",
    )
    parser.add_argument(
        "--shared",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="existing directory that all hosts must see, e.g. the parent of the run directory "
        "(default: the current one)",
    )
    port = whole_number(1, 65535)
    parser.add_argument("--ssh-port", type=port, help="sshd port on the hosts")
    parser.add_argument(
        "--metrics-port", type=port, default=9400, help="telemetry port of a host's first rank"
    )
    parser.add_argument(
        "--master-port", type=port, default=29500, help="rendezvous port of the first host"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def check(options: argparse.Namespace) -> int:
    """Print hosts, slots and the number of ranks. Returns 1 where a host is not fit."""
    from sgt_ds.launch import parse_hostfile, probe, table, world_size

    hosts = parse_hostfile(options.file)
    if not options.probe:
        if options.json:
            names = [{"name": host.name, "slots": host.slots} for host in hosts]
            print_json({"hosts": names, "world_size": world_size(hosts)})
        else:
            for host in hosts:
                print(f"{host.name}  {counted(host.slots, 'rank')}")
            print(f"{counted(len(hosts), 'host')}, {counted(world_size(hosts), 'rank')}")
        return 0
    found = probe(
        hosts,
        shared=options.shared,
        ssh_port=options.ssh_port,
        metrics_port=options.metrics_port,
        master_port=options.master_port,
    )
    if options.json:
        print_json({"hosts": [one.as_json() for one in found], "world_size": world_size(hosts)})
    else:
        print(table(found))
        print(f"{counted(len(hosts), 'host')}, {counted(world_size(hosts), 'rank')}")
    return int(any(one.faults for one in found))
