"""The launcher's thin entry: `deepspeed --module sgt_ds.train RUN.yaml [key=value …]`.

Only builds, trains, closes. Exit status: 0 done or stopped on request, 1 failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sgt_ds.config import (
    RunConfig,
    RunLayout,
    at_fault,
    check_only_run,
    check_run_directory,
    key_of_path,
    load_run_config,
    resolve_deepspeed,
    start_warnings,
    told_rank,
    told_world_size,
)
from sgt_ds.errors import SgtError, UserError, refused_by_system
from sgt_ds.evaluation import named_tasks
from sgt_ds.flops import run_warnings
from sgt_ds.growth import check_method
from sgt_ds.launch import (
    RUN_ID_VARIABLE,
    check_named_checkpoints,
    fork_step,
    is_hostfile,
    launch_name,
)
from sgt_ds.terminal import take_any_text

if TYPE_CHECKING:
    from sgt_ds.training import Heartbeat

log = logging.getLogger("sgt_ds")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as this rank. Returns the exit status."""
    heartbeat: Heartbeat | None = None
    take_any_text()
    options = _options(arguments)
    try:
        config = _configuration(options)
        from sgt_ds.training import join_ranks, leave_ranks, lost_peers_told, run

        config_file = str(options.run)
        resolve_deepspeed(config, told_world_size(), config_file)
        resuming = check_run_directory(config)
        supervised = RUN_ID_VARIABLE in os.environ  # by `sgt-ds train`
        if not supervised:
            # The raw launcher tells no rank which hostfile it was given.
            check_only_run(config, config_file, is_given=is_hostfile)
            check_named_checkpoints(config, config_file)
            _warn(config)
        with _heartbeat(config) as heartbeat, lost_peers_told(heartbeat):
            ranks = join_ranks(config.training.collective_timeout_seconds)
            heartbeat.enter("start")
            try:
                run(
                    config,
                    ranks,
                    config_file,
                    heartbeat,
                    resuming=resuming,
                    supervised=supervised,
                )
                heartbeat.enter("agreement")  # NCCL's ranks leave together
            finally:
                leave_ranks()
    except SgtError as error:
        if isinstance(error, UserError):
            error = at_fault(error, options.run, options.overrides)
        # Until the ranks join, all of them meet the same error; one line is enough.
        return _tell(error, shared=heartbeat is None or error.everywhere)
    except (OSError, RuntimeError) as error:
        refused = refused_by_system(
            error, lambda path: key_of_path(path, options.run, options.overrides)
        )
        if refused is None:
            raise
        status = _tell(refused, shared=heartbeat is None)
        # What was good at the start may be so again at the next one.
        return status if heartbeat is None or heartbeat.is_starting else SgtError.exit_code
    return 0


def _tell(error: SgtError, *, shared: bool) -> int:
    """Print an error in one line, by the first rank where all meet it. Returns its exit status."""
    if not shared or _is_first():
        print(f"sgt-ds train: {error}", file=sys.stderr, flush=True)
    return error.exit_code


def _warn(config: RunConfig) -> None:
    if not _is_first():
        return
    for warning in [*run_warnings(config, fork_step(config)), *start_warnings(config)]:
        print(f"sgt-ds train: warning: {warning}", file=sys.stderr, flush=True)


def _heartbeat(config: RunConfig) -> Heartbeat:
    from sgt_ds.training import Heartbeat

    # Raw launches of one run follow each other, and have no id: their meeting place will do.
    launch = launch_name(os.environ.get(RUN_ID_VARIABLE, "")) or "-".join(
        ["raw", *(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))]
    )
    return Heartbeat(
        RunLayout(config.run_dir).signs_of_life(launch),
        told_rank() or 0,
        world_size=told_world_size(),
        hang_seconds=config.training.hang_seconds,
        patient_seconds=config.training.collective_timeout_seconds,
        launched=RUN_ID_VARIABLE in os.environ,
    )


def _is_first() -> bool:
    """Whether this is the rank that speaks for all; so is each one that cannot tell its rank."""
    try:
        return not told_rank()
    except UserError:
        return True


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sgt_ds.train", description="One rank of a training run."
    )
    parser.add_argument("run", type=Path, metavar="RUN.yaml")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument(
        "--deepspeed_config", type=Path, help="DeepSpeed JSON to use instead of the run's"
    )
    parser.add_argument(
        "--local_rank", type=int, help="passed by the launcher, which also sets LOCAL_RANK"
    )
    options = parser.parse_intermixed_args(arguments)
    if options.deepspeed_config is not None:
        options.overrides.append(f"deepspeed={options.deepspeed_config}")
    return options


def _configuration(options: argparse.Namespace) -> RunConfig:
    config = load_run_config(options.run, options.overrides)
    check_method(config.method, str(options.run))
    named_tasks(config.evaluation, str(options.run))
    return config


if __name__ == "__main__":
    raise SystemExit(main())
