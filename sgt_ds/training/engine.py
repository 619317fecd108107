"""The process group and the DeepSpeed engine: everything this package passes to DeepSpeed."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import safe_set_full_fp32_param
from pydantic import ValidationError
from torch import nn

from sgt_ds.checkpoints import from_first
from sgt_ds.config import (
    RunConfig,
    launcher_number,
    resolve_deepspeed,
    told_local_size,
    told_rank,
)
from sgt_ds.errors import UserError
from sgt_ds.training.network import adopt_mpirun, choose_gloo_interface
from sgt_ds.training.optimizer import build_optimizer
from sgt_ds.training.zero import (
    judge_by_the_norm,
    judge_without_zero,
    reduce_in_place,
    reduce_without_the_host,
)

log = logging.getLogger(__name__)

# Where a ring adds up bf16 gradients one rank after another, the sum of so many is about 2% off, and
# of 1,024, where they agree, a third too small: a share no longer moves the sum.
BF16_SUM_RANKS = 256

# Set for one process that no launcher started, so that `python -m sgt_ds.train` works as well.
_SINGLE_PROCESS = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among all of them."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    host_group: dist.ProcessGroup
    """gloo group of all ranks, for host-side values: no device synchronisation."""

    @property
    def is_main(self) -> bool:
        """Global rank 0 writes journal, metrics and log, and exports the run-wide series."""
        return self.rank == 0

    @property
    def local_size(self) -> int:
        """Ranks on this host; 1 where the launcher does not tell."""
        return told_local_size()

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is set on any rank: the same answer on all. Collective."""
        votes = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.host_group)
        return [bool(vote) for vote in votes.tolist()]

    def on_main(self, action: Callable[[], None]) -> None:
        """Let rank 0 act while the others wait. Collective.

        Raises: rank 0's UserError, on all ranks.
        """
        self.from_main(action)

    def from_main(self, action: Callable[[], Answer]) -> Answer:
        """What `action` gives on rank 0, on every rank. Collective.

        Raises: rank 0's UserError, on all ranks.
        """
        return from_first(action, self.host_group)


def join_ranks(timeout_seconds: float) -> Ranks:
    """Join the process group that the launcher's environment describes. Collective.

    `timeout_seconds`: how long a collective waits for a rank that is late.
    Raises: UserError where that environment is not whole.
    """
    for name in _SINGLE_PROCESS:
        if not os.environ.get(name, "").strip():
            os.environ.pop(name, None)  # torch would read it as a number
    if told_rank() is None:
        os.environ.update(_SINGLE_PROCESS)
    adopt_mpirun()
    _check_whole()
    choose_gloo_interface()
    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    if on_cpu:
        # DeepSpeed would compile a shared-memory all-reduce on first use (~40 s, needs a
        # compiler, and a killed build hangs every later run); gloo alone needs none of it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    timeout = timedelta(seconds=timeout_seconds)
    try:
        deepspeed.init_distributed(
            dist_backend="gloo" if on_cpu else accelerator.communication_backend_name(),
            timeout=timeout,
            verbose=False,
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ.get("MASTER_PORT", "")
        raise UserError(
            f"--master_port {port}",
            None,
            "is in use on this host, perhaps by another run; give the launcher a free port",
        ) from None
    local_rank = launcher_number("LOCAL_RANK") or 0
    if not on_cpu:
        accelerator.set_device(local_rank)
        # That device is the right one; DeepSpeed's barriers cannot name it.
        warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under")
    return Ranks(
        rank=dist.get_rank(),
        local_rank=local_rank,
        world_size=dist.get_world_size(),
        device=torch.device(accelerator.current_device_name()),
        host_group=dist.new_group(backend="gloo", timeout=timeout),
    )


def _check_whole() -> None:
    """Raises: UserError where a launcher's variable is missing or no number.

    Of a rank that has none of its own, DeepSpeed asks MPI for all of them.
    """
    told_local_size()  # here, where no rank waits for one that fails
    if "RANK" not in os.environ:
        return
    for name in _SINGLE_PROCESS:
        if name not in os.environ:
            message = "is not set, though RANK is; let a launcher set both, or neither"
            raise UserError("environment", name, message)
        if name != "MASTER_ADDR":
            launcher_number(name)


def leave_ranks() -> None:
    """Leave the process group: a gloo run that just ends may abort at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()


def build_engine(
    model: nn.Module, config: RunConfig, ranks: Ranks, config_file: str
) -> deepspeed.DeepSpeedEngine:
    """Wrap the model in a DeepSpeed engine with ZeRO, precision and clipping as configured.

    Raises: UserError where the DeepSpeed file and the run configuration do not fit each other.
    """
    # DeepSpeed calls it by the name that torch gives up.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    values = resolve_deepspeed(config, ranks.world_size, config_file)
    _check_zero(config.deepspeed, values.get("zero_optimization", {}))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=build_optimizer(model, config.optimizer),
        config=values,
        dist_init_required=False,
    )
    if engine.zero_optimization_stage() == 0:
        judge_without_zero(engine)
    else:
        judge_by_the_norm(engine.optimizer)
        reduce_in_place(engine.optimizer, ranks.world_size)
    if ranks.device.type == "cuda":
        reduce_without_the_host(engine.optimizer)
    return engine


def set_masters(engine: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Give the float32 master weights their values, by name of a parameter.

    Under bf16 the engine makes them of weights that it has rounded.
    """
    for name, parameter in engine.module.named_parameters():
        safe_set_full_fp32_param(parameter, weights[name])


def say_what_sums_lose(engine: Any, world_size: int, path: Path) -> None:
    """Warn where more ranks add up their gradients in bf16 than it has digits for.

    `path`: the DeepSpeed file.
    """
    if world_size >= BF16_SUM_RANKS and engine.communication_data_type == torch.bfloat16:
        log.warning(
            "%s: communication_data_type: %d ranks add up their gradients in bf16, which loses "
            'much of the sum where NCCL uses a ring; set it to "fp32" (twice the traffic)',
            path,
            world_size,
        )


def say_what_micro_batches_lose(engine: Any, path: Path) -> None:
    """Warn where the gradients of several micro-batches add up in less than float32.

    `path`: the DeepSpeed file.
    """
    _, added_in = engine.get_data_types()
    if engine.gradient_accumulation_steps() > 1 and added_in != torch.float32:
        log.warning(
            "%s: data_types.grad_accum_dtype: the gradients of %d micro-batches add up in %s, "
            'which loses what is small beside the sum; "fp32" loses nothing',
            path,
            engine.gradient_accumulation_steps(),
            str(added_in).removeprefix("torch."),
        )


def _check_zero(path: Path, section: Mapping[str, Any]) -> None:
    """Refuse in one line what DeepSpeed's own check of the section would refuse in a traceback."""
    try:
        DeepSpeedZeroConfig(**section)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(("zero_optimization", *map(str, first["loc"])))
        message = f"{first['msg']} (got {first['input']!r}); correct or remove it"
        raise UserError(path, field, message, everywhere=True) from None


def set_learning_rate(groups: Iterable[dict[str, Any]], rate: float) -> None:
    """Give every parameter group the same learning rate."""
    for group in groups:
        group["lr"] = rate
