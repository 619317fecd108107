"""Assembles a run: configuration in, a trainer at the point where it left off out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from sgt_ds.checkpoints import agree_on_input
from sgt_ds.config import (
    GrowthConfig,
    RunConfig,
    RunLayout,
    prepare_run_directory,
    save_run_config,
)
from sgt_ds.data import Loader, check_data, check_shards, open_token_set, validation_batches
from sgt_ds.errors import SgtError, UserError
from sgt_ds.files import writing
from sgt_ds.flops import (
    FlopsCounter,
    Layout,
    Memory,
    Outcome,
    earliest_outcome,
    layout_of_run,
    memory_per_rank,
    passes_to_come,
)
from sgt_ds.growth import (
    GrowthController,
    Journal,
    build_policy,
    journal_header,
    resolve_growth,
    settled_growth,
)
from sgt_ds.model import Transformer, float8_fault
from sgt_ds.telemetry import peak_flops, stopped_as_requested, write_outcome
from sgt_ds.training.capacity import say_what_memory_lacks
from sgt_ds.training.compile_ahead import CompileAhead, memory_for
from sgt_ds.training.compile_kinds import Work, kinds_of
from sgt_ds.training.compiling import CompileCache
from sgt_ds.training.engine import (
    Ranks,
    build_engine,
    say_what_micro_batches_lose,
    say_what_sums_lose,
    set_masters,
)
from sgt_ds.training.environment import note_start, reached_step
from sgt_ds.training.evaluation import build_evaluation
from sgt_ds.training.faults import Requests
from sgt_ds.training.heartbeat import Heartbeat
from sgt_ds.training.lost_peers import lost_peers_told
from sgt_ds.training.parts import StepParts
from sgt_ds.training.resume import restore
from sgt_ds.training.rollback import uncut_metrics
from sgt_ds.training.run_directory import MetricsFile, only_trainer, set_up_logging
from sgt_ds.training.saves import RunCheckpoints
from sgt_ds.training.start import checked_start, start_weights
from sgt_ds.training.telemetry import start_telemetry
from sgt_ds.training.trainer import Trainer
from sgt_ds.training.validation import ValidationLoss

log = logging.getLogger(__name__)


def run(
    config: RunConfig,
    ranks: Ranks,
    config_file: str,
    heartbeat: Heartbeat,
    *,
    resuming: bool,
    supervised: bool,
) -> None:
    """Build, train, close. Collective.

    `resuming`: whether the run directory held this run before. `supervised`: whether `sgt-ds train`
    notes how the run ends; otherwise rank 0 does, as it does where the data end before the last
    step: no one else knows.
    Raises: UserError, Diverged, StateMismatch.
    """
    check_data(config.data, config.model, config.evaluation)
    ranks.on_main(lambda: check_shards(config.data))
    if config.training.fp8:
        _check_float8(ranks, config_file)
    with ExitStack() as held:
        ranks.on_main(lambda: held.enter_context(only_trainer(config.run_dir)))
        if ranks.is_main and not supervised:
            held.enter_context(_noted_failure(config))
            held.enter_context(lost_peers_told(heartbeat))  # what is noted is the line that is told
        config = prepare(config, ranks, resuming=resuming)
        _set_up_logging(config, ranks)
        trainer = build_trainer(config, ranks, config_file, heartbeat)
        try:
            heartbeat.enter("start")
            layout = RunLayout(config.run_dir)
            reached = reached_step(uncut_metrics(layout)) if ranks.is_main else None
            load_seconds = restore(trainer, config, ranks, resuming=resuming)
            if resuming:  # only now is it known to be the same run
                ranks.on_main(lambda: save_run_config(config))
            if ranks.is_main:
                note_start(config, ranks, trainer.clock.step, reached, load_seconds)
            end = trainer.train()
            if end == "completed" or trainer.asked_by_file:
                # Before any rank ends: closing waits for scrapers, and supervisors, of other hosts
                # too, judge the run meanwhile.
                ranks.on_main(lambda: _note_success(config, end, trainer))
        finally:
            trainer.close()
        if ranks.is_main and not supervised:
            # Again: what is older than logs that closing wrote to counts as an earlier start's end.
            _note_success(config, end, trainer)


def _set_up_logging(config: RunConfig, ranks: Ranks) -> None:
    """Collective. Raises: UserError, on all ranks, where one cannot write its log."""
    fault: UserError | None = None
    try:
        set_up_logging(config.run_dir, ranks.rank)
    except UserError as error:
        fault = error
    agree_on_input(fault, ranks.host_group)


@contextmanager
def _noted_failure(config: RunConfig) -> Iterator[None]:
    """Note how the block fails as the run's end; not for bad input, with which nothing was trained."""
    try:
        yield
    except UserError:
        raise
    except SgtError as error:
        _note_end(config, 1, f"the run failed: {error}")
        raise
    except Exception as error:
        said = (f"{error}".splitlines() or [""])[0][:300]
        what = ": ".join(filter(None, (type(error).__name__, said)))
        _note_end(config, 1, f"the run failed: {what}")
        raise


def _note_success(
    config: RunConfig, end: Literal["completed", "stopped"], trainer: Trainer
) -> None:
    step, steps = trainer.clock.step, config.training.steps
    if end == "stopped":
        _note_end(config, 0, stopped_as_requested(step, steps))
    elif step == steps:
        _note_end(config, 0, f"complete at step {step}")
    else:
        source = trainer.loader.exhausted_source
        reason = f"complete at step {step} of {steps}: {source} is exhausted (data.exhausted: stop)"
        _note_end(config, 0, reason, data_end_step=step)


def _note_end(
    config: RunConfig, status: int, reason: str, *, data_end_step: int | None = None
) -> None:
    with suppress(OSError):  # it is for people: the run itself ended as it did
        control = RunLayout(config.run_dir).control
        write_outcome(control, status, reason, data_end_step=data_end_step)


def prepare(config: RunConfig, ranks: Ranks, *, resuming: bool) -> RunConfig:
    """Make the run directory. Returns the configuration as saved there, settled. Collective.

    Raises: UserError, on all ranks.
    """
    journal = RunLayout(config.run_dir).journal
    growth = ranks.from_main(lambda: settled_growth(config, journal))
    settled = config.model_copy(update={"growth": growth})
    ranks.on_main(lambda: prepare_run_directory(settled, resuming=resuming))
    return settled


def build_trainer(
    config: RunConfig, ranks: Ranks, config_file: str, heartbeat: Heartbeat
) -> Trainer:
    """Build every part of a run, at step 0. Collective. `config`: as `prepare` returns it.

    Raises: UserError where data, model, files or ports do not fit each other.
    """
    layout = RunLayout(config.run_dir)
    settled = resolve_growth(config.growth, config.model)
    planned = _planned(config, settled)
    spread = layout_of_run(config, ranks.world_size, config_file)
    needed = _memory(config, planned, spread)
    if ranks.is_main:
        say_what_memory_lacks(needed, config.training, ranks.device, ranks.local_size)
    weights = _start_weights(config, ranks, layout)
    model = _model(config, ranks, weights)
    heartbeat.enter("start")
    compiled = _compiled(config, ranks)
    engine = build_engine(model, config, ranks, config_file)
    if weights is not None:
        set_masters(engine, weights)
    parts = StepParts(ranks.device, heartbeat.enter)
    parts.time_reduction(engine)
    heartbeat.enter("start")
    loader = _loader(config, ranks)
    _say_that_float8_is_slow(config, ranks)
    say_what_sums_lose(engine, ranks.world_size, config.deepspeed)
    say_what_micro_batches_lose(engine, config.deepspeed)
    _say_what_data_imply(config, loader, ranks)
    growth = _growth(config, settled, layout, ranks, heartbeat)
    telemetry = start_telemetry(config, ranks, lambda: heartbeat.progressed_at)
    checkpoints = RunCheckpoints(
        config,
        ranks,
        engine,
        token_set=loader.token_sets[0],
        telemetry=telemetry,
        waiting=heartbeat.waiting,
        moved=heartbeat.moved,
    )
    heartbeat.saves = checkpoints.is_under_way
    return Trainer(
        config,
        ranks=ranks,
        engine=engine,
        loader=loader,
        growth=growth,
        flops=FlopsCounter(config.model, config.data.sequence_length),
        telemetry=telemetry,
        metrics=_metrics(layout, ranks),
        checkpoints=checkpoints,
        requests=Requests(layout, heartbeat),
        heartbeat=heartbeat,
        validation=_validation(config, ranks, engine, heartbeat),
        evaluation=build_evaluation(
            config, engine.module, ranks, loader.token_sets[0], layout.evaluations, heartbeat
        ),
        peak_flops=_peak_flops(ranks.device),
        planned_overhead=planned.overhead_at,
        parts=parts,
        compiled=compiled,
        ahead=_ahead(config, settled, engine.module, spread, needed.total, ranks),
    )


def _start_weights(config: RunConfig, ranks: Ranks, layout: RunLayout) -> dict[str, Tensor] | None:
    """The weights that the run begins with; None where it draws them or has saved some. Collective."""
    path = config.init
    # Once saved, a run needs its start no more.
    if path is None or layout.has_checkpoints():
        return None
    start = ranks.from_main(lambda: checked_start(path, config.model))
    log.info("weights of %s", path)
    return start_weights(start, config.model)


def _model(config: RunConfig, ranks: Ranks, weights: dict[str, Tensor] | None) -> Transformer:
    """The model on this rank's device."""
    training = config.training
    model = Transformer(
        config.model,
        seed=training.seed,
        compile_blocks=training.compile,
        activation_checkpointing=training.activation_checkpointing,
        fp8=training.fp8,
    )
    if weights is not None:
        model.load_state_dict(weights)
    return model.to(ranks.device)


def _compiled(config: RunConfig, ranks: Ranks) -> CompileCache | None:
    """What an earlier start compiled, loaded; None where nothing is kept. Collective."""
    if config.training.compile_cache is None:
        return None
    compiled = CompileCache(config.training.compile_cache, ranks)
    compiled.load()
    return compiled


def _ahead(
    config: RunConfig,
    settled: GrowthConfig,
    model: Transformer,
    spread: Layout,
    planned_bytes: int,
    ranks: Ranks,
) -> CompileAhead | None:
    """What compiles the kinds of block to come beside training; None where nothing does."""
    training, on_gpu = config.training, ranks.device.type == "cuda"
    # Documents as a CPU computes them are not compiled.
    uncompiled = config.data.document_mask and not on_gpu
    if uncompiled or not training.compiles_ahead(on_gpu=on_gpu):
        return None
    coming = passes_to_come(config.method, settled, config.model, training.steps)
    measured = (True,) if settled.entropy_every == 1 else (False, True)
    kinds = tuple(kinds_of(coming, measured))
    length = config.data.sequence_length
    work = Work(
        config.model,
        device=str(ranks.device),
        dtype=str(model.embedding.weight.dtype).removeprefix("torch."),
        micro_batch_size=training.micro_batch_size,
        sequence_length=length,
        document_mask=config.data.document_mask,
        activation_checkpointing=training.activation_checkpointing,
        fp8=training.fp8,
        memory_bytes=memory_for(config.model, length, spread, (kind.passes for kind in kinds)),
        kinds=kinds,
    )
    return CompileAhead(work, planned_bytes)


def _loader(config: RunConfig, ranks: Ranks) -> Loader:
    data, training = config.data, config.training
    return Loader(
        data.train,
        sequence_length=data.sequence_length,
        global_batch_size=training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
        seed=training.seed,
        document_starts=data.document_mask,
        exhausted=data.exhausted,
        cache_dir=data.cache_dir,
    )


def _growth(
    config: RunConfig,
    settled: GrowthConfig,
    layout: RunLayout,
    ranks: Ranks,
    heartbeat: Heartbeat,
) -> GrowthController:
    """The controller, with the run's journal on rank 0. Collective."""
    header, opened = journal_header(config, settled), list[Journal]()

    def open_it() -> None:
        with writing(layout.journal):
            opened.append(Journal.open_or_create(layout.journal, header))

    ranks.on_main(open_it)
    return GrowthController(
        build_policy(config.method, settled, config.model),
        settled,
        config.model,
        journal=opened[0] if ranks.is_main else None,
        group=ranks.host_group,
        device=ranks.device,
        writes=lambda: heartbeat.enter("report"),
    )


def _metrics(layout: RunLayout, ranks: Ranks) -> MetricsFile | None:
    """The run's metrics, open on rank 0. Collective."""
    opened: list[MetricsFile] = []

    def open_it() -> None:
        with writing(layout.metrics):
            opened.append(MetricsFile(layout.metrics))

    ranks.on_main(open_it)
    return opened[0] if ranks.is_main else None


def _planned(config: RunConfig, settled: GrowthConfig) -> Outcome:
    """FLOPs, and what layers run when, of the earliest growth: the most that can come."""
    return earliest_outcome(
        config.model,
        config.method,
        settled,
        sequence_length=config.data.sequence_length,
        global_batch_size=config.training.global_batch_size,
        steps=config.training.steps,
    )


def _memory(config: RunConfig, planned: Outcome, spread: Layout) -> Memory:
    """What a rank needs at its peak, loops included."""
    passes = [segment.passes for segment, _ in planned.segments]
    return memory_per_rank(config.model, config.data.sequence_length, spread, passes)


def _check_float8(ranks: Ranks, config_file: str) -> None:
    """Collective. Raises: UserError, on all ranks, where the device of one has no float8."""
    faults: list[str | None] = [None] * ranks.world_size
    dist.all_gather_object(faults, float8_fault(ranks.device), group=ranks.host_group)
    for rank, fault in enumerate(faults):
        if fault is not None:
            message = f"rank {rank} is on {fault}; use other GPUs, or set it to false"
            raise UserError(config_file, "training.fp8", message, everywhere=True)


def _say_that_float8_is_slow(config: RunConfig, ranks: Ranks) -> None:
    if config.training.fp8 and ranks.device.type == "cpu":
        log.warning(
            "training.fp8: a CPU emulates float8, many times slower than bf16; use it for "
            "tests only"
        )


def _say_what_data_imply(config: RunConfig, loader: Loader, ranks: Ranks) -> None:
    if config.data.document_mask and config.training.compile and ranks.device.type != "cuda":
        log.info(
            "data.document_mask: blocks are not compiled on this device, because documents "
            "differ at each step"
        )
    last = loader.last_batches
    if last is not None and last < config.training.steps:
        log.warning(
            "data.exhausted: %s lasts for %d of %d updates; the run stops there",
            loader.exhausted_source,
            last,
            config.training.steps,
        )


def _validation(
    config: RunConfig, ranks: Ranks, engine: Any, heartbeat: Heartbeat
) -> ValidationLoss | None:
    if config.data.validation is None:
        return None
    batches = partial(
        validation_batches,
        open_token_set(config.data.validation, config.data.cache_dir),
        sequence_length=config.data.sequence_length,
        sequences=config.training.validation_sequences,
        micro_batch_size=config.training.micro_batch_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
        document_starts=config.data.document_mask,
    )
    return ValidationLoss(engine.module, batches, ranks, heartbeat)


def _peak_flops(device: torch.device) -> float | None:
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
