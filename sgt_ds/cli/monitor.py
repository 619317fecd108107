"""`sgt-ds monitor`: what Prometheus needs to find a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sgt_ds.cli.frame import Parser, Subparsers, add_command, add_group, whole_number
from sgt_ds.progress import counted


def register(commands: Subparsers[Parser]) -> None:
    """Add the commands."""
    group = add_group(commands, "monitor", "Generate Prometheus targets for a run's exporters.")
    parser = add_command(
        group,
        "targets",
        "Write Prometheus file_sd JSON: one target per rank, labelled run, host and rank.",
        "sgt-ds monitor targets hostfiles/cluster --run 573m-sgt --out "
        "monitoring/targets/573m.json",
        show_targets,
    )
    parser.add_argument("hostfile", type=Path, metavar="HOSTFILE", help="DeepSpeed hostfile")
    parser.add_argument(
        "--run",
        required=True,
        metavar="NAME|DIR",
        help="value of the label run; or the run directory, which gives name and port",
    )
    parser.add_argument(
        "--port",
        type=whole_number(1, 65535),
        help="telemetry.port of the run (default: the run directory's, or 9400)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file to replace atomically (default: stdout)"
    )


def show_targets(options: argparse.Namespace) -> None:
    """Write the targets."""
    from sgt_ds.config import RunLayout, TelemetryConfig, load_run_config
    from sgt_ds.errors import UserError, refusal
    from sgt_ds.files import output_writer
    from sgt_ds.launch import parse_hostfile
    from sgt_ds.telemetry import targets

    hosts = [(host.name, host.slots) for host in parse_hostfile(options.hostfile)]
    layout = RunLayout(Path(options.run))
    name, port = options.run, TelemetryConfig().port
    if not name.strip() or not name.isprintable():
        raise UserError("--run", None, "is empty or holds control characters; give a run's name")
    if "/" in name and not layout.config.exists():
        raise UserError(
            layout.run_dir, None, "holds no run.yaml yet; start the run first, or give its name"
        )
    if layout.config.exists():
        config = load_run_config(layout.config)
        name, port = config.run_dir.name, config.telemetry.port  # as its exporters say
    groups = targets(hosts, run=name, port=options.port or port)
    text = json.dumps(groups, indent=2) + "\n"
    if options.out is None:
        print(text, end="")
        return
    try:
        with output_writer(options.out) as stream:
            stream.write(text.encode())
    except OSError as error:
        message = refusal(error, "written", instead="name another file")
        raise UserError(options.out, "--out", message) from None
    print(f"{options.out}: {counted(len(groups), 'target')} of run {name}")
