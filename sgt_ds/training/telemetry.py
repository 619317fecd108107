"""The exporters of a run's ranks, and what rank 0 reports of all: joins telemetry and run."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

from sgt_ds import __version__
from sgt_ds.config import RunConfig, RunLayout, config_hash
from sgt_ds.errors import UserError
from sgt_ds.files import write_text_atomically
from sgt_ds.telemetry import (
    Exporter,
    HardwareSampler,
    TargetGroup,
    Tracker,
    beyond_loopback,
    own_target,
    tensorboard,
    wandb,
)
from sgt_ds.training.engine import Ranks

log = logging.getLogger(__name__)


def start_telemetry(
    config: RunConfig, ranks: Ranks, progressed_at: Callable[[], float]
) -> Exporter | None:
    """Serve metrics from every rank; None where `telemetry.enabled` is false. Collective.

    `progressed_at`: when this rank last got on, in Unix seconds. Any thread asks.
    Raises: UserError on all ranks where one cannot serve.
    """
    if not config.telemetry.enabled:
        return None
    exporter: Exporter | None = None
    told: UserError | TargetGroup
    run = config.run_dir.name
    try:
        exporter = _exporter(config, ranks, progressed_at)
        exporter.start()
        told = own_target(config.telemetry.host, exporter.port, run=run, rank=ranks.rank)
    except UserError as error:
        told = error
    everyone: list[UserError | TargetGroup] = [told] * ranks.world_size
    dist.all_gather_object(everyone, told, group=ranks.host_group)
    groups: list[TargetGroup] = []
    for answer in everyone:
        if isinstance(answer, UserError):
            raise answer.on_all_ranks()
        groups.append(answer)
    if exporter is not None and ranks.is_main:
        announced = beyond_loopback(groups)
        if announced != groups:
            log.info(
                "telemetry: exporters listen on %s, so no one can scrape those of other hosts than "
                "%s; set telemetry.host, for example to 0.0.0.0",
                config.telemetry.host,
                announced[0]["labels"]["host"],
            )
        exporter.serve_targets(announced)
        _write_targets(config, announced)
    return exporter


def _exporter(config: RunConfig, ranks: Ranks, progressed_at: Callable[[], float]) -> Exporter:
    layout, cuda = RunLayout(config.run_dir), ranks.device.type == "cuda"
    return Exporter(
        config.telemetry,
        run_wide=ranks.is_main,
        local_rank=ranks.local_rank,
        rank=ranks.rank,
        info={
            "run": config.run_dir.name,
            "method": config.method,
            "preset": config.preset or "custom",
            "version": __version__,
            "config_hash": config_hash(config),
            "world_size": str(ranks.world_size),
            "device": torch.cuda.get_device_name(ranks.device) if cuda else "cpu",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "deepspeed": version("deepspeed"),
        },
        model=config.model,
        run_steps=config.training.steps,
        checkpoint_steps=config.checkpoint.every,
        loads=config.fork is not None
        or isinstance(config.resume, Path)
        or layout.has_checkpoints(),
        counters_file=layout.exporter_counters,
        progressed_at=progressed_at,
        hardware=HardwareSampler(
            config.run_dir,
            # As NVML names it, whatever CUDA_VISIBLE_DEVICES makes of the numbers.
            f"GPU-{torch.cuda.get_device_properties(ranks.device).uuid}" if cuda else None,
        ),
        trackers=_trackers(config) if ranks.is_main else (),
    )


def _trackers(config: RunConfig) -> list[Tracker]:
    layout, telemetry = RunLayout(config.run_dir), config.telemetry
    trackers = []
    if telemetry.tensorboard:
        trackers.append(tensorboard(layout.tensorboard))
    if telemetry.wandb is not None:
        trackers.append(
            wandb(
                telemetry.wandb,
                layout.wandb,
                run=config.run_dir.name,
                config=config.model_dump(mode="json"),
            )
        )
    return trackers


def _write_targets(config: RunConfig, groups: list[TargetGroup]) -> None:
    """For a Prometheus that reads files: where the ranks are since this start."""
    paths = {"run_dir": RunLayout(config.run_dir).targets}
    if (folder := config.telemetry.targets_dir) is not None:
        paths["telemetry.targets_dir"] = folder / f"{config.run_dir.name}.json"
    for field, path in paths.items():
        try:
            with suppress(FileExistsError):  # where it is a file, the write says so better
                path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(path, json.dumps(groups, indent=2) + "\n")
        except OSError as error:
            log.warning(
                "%s: %s cannot be written (%s), so Prometheus will not find this start there; the "
                "next start tries again",
                field,
                path,
                error.strerror,
            )
