"""Joins the finished parts of a run: configuration in, a trainer that stands where it left off out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from sgt_ds import __version__
from sgt_ds.config import RunConfig, RunLayout, config_hash
from sgt_ds.data import Loader, open_token_set, validation_batches
from sgt_ds.flops import FlopsCounter
from sgt_ds.growth import GrowthController, Journal, build_policy
from sgt_ds.model import Transformer
from sgt_ds.telemetry import Exporter, peak_flops
from sgt_ds.training.engine import Ranks, build_engine
from sgt_ds.training.faults import StopRequest
from sgt_ds.training.resume import RunCheckpoints, restore
from sgt_ds.training.run_directory import MetricsFile, prepare_run_directory, set_up_logging
from sgt_ds.training.trainer import Trainer
from sgt_ds.training.validation import ValidationLoss


def run(config: RunConfig, ranks: Ranks, config_file: str, *, resuming: bool) -> bool:
    """Build, train, close. Returns whether the run is complete. Collective."""
    if ranks.is_main:
        prepare_run_directory(config)
    ranks.barrier()
    set_up_logging(config.run_dir, ranks.rank)
    trainer = build_trainer(config, ranks, config_file, resuming=resuming)
    try:
        return trainer.train()
    finally:
        trainer.close()


def build_trainer(config: RunConfig, ranks: Ranks, config_file: str, *, resuming: bool) -> Trainer:
    """Build every part, and restore what the run left off with. Collective.

    `resuming`: whether the run directory held this run before.
    Raises: UserError where data, model, files or ports do not fit each other.
    """
    layout = RunLayout(config.run_dir)
    loader, tokenizer = _open_data(config, ranks)
    model = Transformer(
        config.model,
        seed=config.training.seed,
        compile_blocks=config.training.compile,
        activation_checkpointing=config.training.activation_checkpointing,
    ).to(ranks.device)
    engine = build_engine(model, config, ranks, config_file)
    growth = GrowthController(
        build_policy(config.method, config.growth, config.model),
        config.growth,
        config.model,
        journal=_open_journal(config, layout) if ranks.is_main else None,
        group=ranks.host_group,
        device=ranks.device,
    )
    stop = StopRequest(layout.stop_request)
    trainer = Trainer(
        config,
        ranks=ranks,
        engine=engine,
        loader=loader,
        growth=growth,
        flops=FlopsCounter(config.model, config.data.sequence_length),
        telemetry=_start_telemetry(config, ranks),
        metrics=MetricsFile(layout.metrics) if ranks.is_main else None,
        checkpoints=RunCheckpoints(config, ranks, engine, tokenizer=tokenizer),
        stop=stop,
        validation=_validation(config, ranks, engine),
        peak_flops=_peak_flops(ranks.device),
    )
    restore(trainer, config, ranks, resuming=resuming)
    return trainer


def _open_data(config: RunConfig, ranks: Ranks) -> tuple[Loader, Path | None]:
    """The loader, and the tokenizer file that the first prepared set holds."""
    data, training = config.data, config.training
    sources = [(open_token_set(source.path), source.weight) for source in data.train]
    for token_set, _ in sources:
        token_set.check(config.model.vocab_size, data.sequence_length)
    loader = Loader(
        sources,
        sequence_length=data.sequence_length,
        global_batch_size=training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
        seed=training.seed,
        pin_memory=ranks.device.type == "cuda",
    )
    return loader, sources[0][0].tokenizer_file


def _validation(config: RunConfig, ranks: Ranks, engine: Any) -> ValidationLoss | None:
    if config.data.validation is None:
        return None
    token_set = open_token_set(config.data.validation)
    token_set.check(config.model.vocab_size, config.data.sequence_length)
    batches = partial(
        validation_batches,
        token_set,
        sequence_length=config.data.sequence_length,
        micro_batch_size=config.training.micro_batch_size,
        sequences=config.training.validation_sequences,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    return ValidationLoss(engine.module, batches, ranks.device)


def _open_journal(config: RunConfig, layout: RunLayout) -> Journal:
    header = {
        "version": __version__,
        "config_hash": config_hash(config),
        "method": config.method,
        "model": config.model.model_dump(mode="json"),
        "growth": config.growth.model_dump(mode="json"),
    }
    return Journal.open_or_create(layout.journal, header)


def _start_telemetry(config: RunConfig, ranks: Ranks) -> Exporter | None:
    if not config.telemetry.enabled:
        return None
    exporter = Exporter(
        config.telemetry,
        model_wide=ranks.is_main,
        local_rank=ranks.local_rank,
        rank=ranks.rank,
        info={
            "run": config.run_dir.name,
            "method": config.method,
            "preset": config.preset or "custom",
            "version": __version__,
            "config_hash": config_hash(config),
        },
        model=config.model,
    )
    exporter.start()
    return exporter


def _peak_flops(device: torch.device) -> float | None:
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
