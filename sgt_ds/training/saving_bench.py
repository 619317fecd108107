"""How long a checkpoint pauses training: blocking, and in the background.

One process, a DeepSpeed engine under ZeRO-2, random tokens. Knows no data and no run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch

from sgt_ds.checkpoints import Retention, Saved, Saver
from sgt_ds.config import ModelConfig, OptimizerConfig
from sgt_ds.flops import parameter_count
from sgt_ds.model import Transformer
from sgt_ds.progress import Progress
from sgt_ds.training.engine import Ranks, join_ranks, leave_ranks
from sgt_ds.training.optimizer import build_optimizer
from sgt_ds.training.timing import synchronize

TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class SavingBench:
    """Medians over the rounds, seconds. `stall`: training does nothing else.

    `checkpoint_bytes`: of one checkpoint. `at_once_seconds`: a save that is waited for.
    `stall_seconds`: of a save beside training, the process's first left out; that one's is
    `first_stall_seconds`. `stall_ratio`, `first_stall_ratio`: to at_once_seconds.
    `written_seconds`: until such a save is complete. `step_seconds`: an update alone;
    `step_beside_seconds`: while one is written.
    """

    parameters: int
    dtype: str
    device: str
    threads: int
    rounds: int
    checkpoint_bytes: int
    at_once_seconds: float
    stall_seconds: float
    first_stall_seconds: float
    stall_ratio: float
    first_stall_ratio: float
    written_seconds: float
    step_seconds: float
    step_beside_seconds: float | None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def bench_saving(
    model: ModelConfig,
    *,
    threads: int,
    dtype: str,
    rounds: int,
    micro_batch_size: int,
    sequence_length: int,
    scratch: Path | None,
) -> SavingBench:
    """Time both ways of saving in turn, `rounds` times. The first must be this process's first.

    `threads`: torch's on the CPU. `dtype`: fp32 or bf16. `scratch`: where checkpoints are written
    for a while; None: the system's temporary folder. Raises: SaveFailed where it is full.
    """
    torch.set_num_threads(threads)
    ranks = join_ranks(TIMEOUT_SECONDS)
    try:
        with tempfile.TemporaryDirectory(prefix="sgt-ds-bench-", dir=scratch) as folder:
            return _measure(
                Path(folder), ranks, model, dtype, rounds, (micro_batch_size, sequence_length)
            )
    finally:
        leave_ranks()


def _measure(
    folder: Path,
    ranks: Ranks,
    model: ModelConfig,
    dtype: str,
    rounds: int,
    shape: tuple[int, int],
) -> SavingBench:
    engine = _engine(ranks, model, dtype, shape[0])
    tokens = torch.randint(model.vocab_size, (shape[0], shape[1] + 1), device=ranks.device)

    def update() -> float:
        began = time.perf_counter()
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]).loss)
        engine.step()
        synchronize(ranks.device)
        return time.perf_counter() - began

    def saver(background: bool) -> Saver:
        return Saver(
            engine,
            folder / ("beside" if background else "at-once"),
            retention=Retention(1),
            group=ranks.host_group,
            background=background,
        )

    at_once, beside = saver(False), saver(True)
    beside.prepare()  # as a run does when it begins to train
    update()  # the optimizer's state is there from now on
    times = _rounds(rounds, ranks, update, at_once, beside)
    at_once.close()
    beside.close()
    return _result(model, dtype, ranks.device, times)


@dataclass
class _Times:
    """Seconds, round by round. `during`: of updates all the while something was written."""

    alone: list[float]
    waits: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    checkpoint_bytes: int = 0


def _rounds(
    rounds: int, ranks: Ranks, update: Callable[[], float], at_once: Saver, beside: Saver
) -> _Times:
    """Save at once and beside training in turn. `update`: takes one, returns its seconds."""
    times = _Times(alone=[update() for _ in range(3)])
    with Progress("bench checkpoint", rounds, "rounds") as progress:
        for step in range(1, rounds + 1):
            began = time.perf_counter()
            at_once.begin(step, {})
            at_once.wait()
            times.waits.append(time.perf_counter() - began)
            beside.begin(step, {})
            saved: Saved | None = None
            while saved is None:  # as the training loop does
                busy = beside.is_busy()
                seconds = update()
                if busy and beside.is_busy():  # it was written all the while
                    times.during.append(seconds)
                if not ranks.any(beside.is_busy())[0]:
                    saved = beside.advance()
            times.stalls.append(saved.stall_seconds)
            times.written.append(saved.seconds)
            times.checkpoint_bytes = sum(file.stat().st_size for file in saved.path.iterdir())
            times.alone.append(update())
            progress.advance(1)
    return times


def _result(model: ModelConfig, dtype: str, device: torch.device, times: _Times) -> SavingBench:
    stalls = times.stalls
    stall, at_once_seconds = statistics.median(stalls[1:] or stalls), statistics.median(times.waits)
    return SavingBench(
        parameters=parameter_count(model),
        dtype=dtype,
        device=device.type,
        threads=torch.get_num_threads(),
        rounds=len(stalls),
        checkpoint_bytes=times.checkpoint_bytes,
        at_once_seconds=at_once_seconds,
        stall_seconds=stall,
        first_stall_seconds=stalls[0],
        stall_ratio=stall / at_once_seconds,
        first_stall_ratio=stalls[0] / at_once_seconds,
        written_seconds=statistics.median(times.written),
        step_seconds=statistics.median(times.alone),
        step_beside_seconds=statistics.median(times.during) if times.during else None,
    )


def _engine(ranks: Ranks, model: ModelConfig, dtype: str, micro_batch_size: int) -> Any:
    transformer = Transformer(model).to(ranks.device)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if dtype == "bf16":
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    engine, *_ = deepspeed.initialize(
        model=transformer,
        optimizer=build_optimizer(transformer, OptimizerConfig()),
        config=settings,
        dist_init_required=False,
    )
    return engine
