"""`sgt-ds train`: check everything, then train under the deepspeed launcher, supervised."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sgt_ds.cli.frame import (
    Parser,
    Subparsers,
    add_command,
    add_run,
    real_number,
    warn,
    whole_number,
)
from sgt_ds.errors import HERE, SgtError, UserError, in_field
from sgt_ds.progress import counted

if TYPE_CHECKING:
    from types import FrameType

    from sgt_ds.launch import Launch, Target


class StoppedEarlyError(SgtError):
    """SIGTERM came before the launch; ends as the signal would have ended the process."""

    exit_code = 128 + signal.SIGTERM


def register(commands: Subparsers[Parser]) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "train",
        "Train or resume: check everything, start the ranks, and supervise them.",
        "sgt-ds train RUN.yaml growth.k_max=2 --num-gpus 8\n"
        "  sgt-ds train RUN.yaml --hostfile hostfiles/cluster --max-restarts 5",
        train,
    )
    add_run(parser, "run configuration")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--hostfile", type=Path, help="hosts to train on: lines of `host slots=N`")
    place.add_argument(
        "--num-gpus",
        type=whole_number(1, 65535),
        default=1,
        metavar="N",
        help="ranks on this machine",
    )
    parser.add_argument(
        "--deepspeed_config", type=Path, help="DeepSpeed JSON to use instead of the run's"
    )
    parser.add_argument(
        "--max-restarts",
        type=whole_number(),
        default=0,
        metavar="N",
        help="restart after a fault, up to N times in a row without progress",
    )
    parser.add_argument(
        "--grace",
        type=real_number(0, 1e6),
        default=120.0,
        metavar="SECONDS",
        help="time to save and exit when asked to stop",
    )
    parser.add_argument(
        "--launcher", default="pdsh", choices=("pdsh", "openmpi"), help="launcher for several hosts"
    )
    parser.add_argument("--launcher-args", default="", help="arguments for pdsh or mpirun")
    parser.add_argument("--ssh-port", type=whole_number(1, 65535), help="sshd port on the hosts")
    parser.add_argument(
        "--no-ssh",
        action="store_true",
        help="something else (Slurm, Kubernetes) starts this command on every host",
    )
    parser.add_argument(
        "--node-rank",
        type=whole_number(0, 65535),
        metavar="N",
        help="index of this host, with --no-ssh",
    )
    parser.add_argument(
        "--num-nodes",
        type=whole_number(1, 65535),
        metavar="N",
        help="number of hosts with --num-gpus ranks each, instead of a hostfile, with --no-ssh",
    )
    parser.add_argument("--master-addr", help="address of the first host, where ranks rendezvous")
    parser.add_argument(
        "--master-port",
        type=whole_number(1, 65535),
        help="rendezvous port on the first host (a free one)",
    )


def train(options: argparse.Namespace) -> int:
    """Supervise the run. Returns its exit status."""
    _check_deepspeed_once(options)
    signal.signal(signal.SIGTERM, _end_before_the_start)

    from sgt_ds.config import RunLayout, load_run_config, start_warnings
    from sgt_ds.data import check_data, check_shards
    from sgt_ds.evaluation import check_evaluation
    from sgt_ds.flops import run_warnings
    from sgt_ds.growth import check_method, settled_growth
    from sgt_ds.launch import (
        Launch,
        check_launch,
        check_side_folders,
        fork_step,
        forwarding_warnings,
        supervise,
    )

    name, first = str(options.run), True

    def prepare(more: Sequence[str]) -> Launch:
        nonlocal first
        overrides = [*options.overrides, *more]
        if options.deepspeed_config is not None:
            overrides.append(f"deepspeed={options.deepspeed_config}")
        config = load_run_config(options.run, overrides)
        check_method(config.method, name)
        check_evaluation(config.evaluation, name)
        target = _target(options)
        check_launch(config, name, target)
        check_data(config.data, config.model, config.evaluation)
        check_shards(config.data)
        settled_growth(config, RunLayout(config.run_dir).journal)
        if first:
            check_side_folders(config, name, target)
        if first and not target.node_rank:
            warn("train", [*run_warnings(config, fork_step(config)), *start_warnings(config)])
        if first and not target.local and target.node_rank is None:
            warn("train", forwarding_warnings(os.environ))
        first = False
        return Launch(config, target, [name, *overrides])

    return supervise(prepare, grace_seconds=options.grace, max_restarts=options.max_restarts)


def _check_deepspeed_once(options: argparse.Namespace) -> None:
    """Raises: UserError where the flag would replace what an override gives."""
    for override in options.overrides:
        if options.deepspeed_config is not None and override.startswith("deepspeed="):
            message = f"conflicts with {override}, which sets the same key; give one of them"
            raise UserError(HERE, "--deepspeed_config", message)


def _end_before_the_start(number: int, frame: FrameType | None) -> None:
    """Until the supervisor takes the signals over, there is nothing to save and no one to end."""
    raise StoppedEarlyError("stop requested before any rank was started; nothing was trained")


def _target(options: argparse.Namespace) -> Target:
    from sgt_ds.launch import Host, Target, is_this_host, parse_hostfile

    if options.no_ssh:
        return _started_by_others(options)
    if options.node_rank is not None or options.num_nodes is not None:
        raise UserError(
            "--node-rank, --num-nodes", None, "require --no-ssh; add it, or give neither"
        )
    if options.hostfile is None:
        hosts = [Host("localhost", options.num_gpus, 0)]
        local = True
    else:
        with in_field("--hostfile"):
            hosts = parse_hostfile(options.hostfile)
        # The launcher would go through ssh for a single host as well.
        local = len(hosts) == 1 and is_this_host(hosts[0])
    return Target(
        tuple(hosts),
        options.hostfile,
        local,
        launcher=options.launcher,
        launcher_arguments=options.launcher_args,
        ssh_port=options.ssh_port,
        master_address=options.master_addr,
        master_port=options.master_port,
    )


def _started_by_others(options: argparse.Namespace) -> Target:
    from sgt_ds.launch import DEFAULT_MASTER_PORT, Host, Target, parse_hostfile

    if options.node_rank is None or options.master_addr is None:
        raise UserError(
            "--no-ssh", None, "requires --node-rank and --master-addr, the first host's address"
        )
    if options.max_restarts:
        raise UserError(
            "--no-ssh",
            "--max-restarts",
            "whatever starts the hosts must restart all of them; let Slurm or Kubernetes do it",
        )
    if options.hostfile is None:
        hosts = [
            Host(f"node-{number}", options.num_gpus, 0) for number in range(options.num_nodes or 1)
        ]
    else:
        with in_field("--hostfile"):
            hosts = parse_hostfile(options.hostfile)
    if options.node_rank >= len(hosts):
        raise UserError(
            "--node-rank",
            None,
            f"{options.node_rank} is out of range for {counted(len(hosts), 'host')}; count from 0",
        )
    return Target(
        tuple(hosts),
        options.hostfile,
        local=False,
        master_address=options.master_addr,
        master_port=options.master_port or DEFAULT_MASTER_PORT,
        node_rank=options.node_rank,
    )
