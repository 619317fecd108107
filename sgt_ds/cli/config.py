"""`sgt-ds config`: print a run configuration as it will be used."""

from __future__ import annotations

import argparse

from sgt_ds.cli.frame import Parser, Subparsers, add_command, add_run, print_json, warn


def register(commands: Subparsers[Parser]) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "config",
        "Print the resolved run configuration, with a description of each key.",
        "sgt-ds config RUN.yaml growth.k_max=2",
        show,
    )
    add_run(parser, "run configuration")
    parser.add_argument("--json", action="store_true", help="print JSON instead of YAML")


def show(options: argparse.Namespace) -> None:
    """Print the configuration."""
    from sgt_ds.config import dump_run_config, load_run_config, read_deepspeed_json
    from sgt_ds.evaluation import named_tasks
    from sgt_ds.flops import run_warnings
    from sgt_ds.growth import check_method

    config = load_run_config(options.run, options.overrides)
    check_method(config.method, str(options.run))
    named_tasks(config.evaluation, str(options.run))
    read_deepspeed_json(config.deepspeed)
    if options.json:
        print_json(config.model_dump(mode="json"))
    else:
        print(dump_run_config(config), end="", flush=True)
    warn("config", run_warnings(config))
