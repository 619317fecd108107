"""What is changed in DeepSpeed's optimizers: what makes them skip an update, and that ZeRO waits,
reads and copies less for the same bits.

Each function changes one object; the places named are DeepSpeed 0.19's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import clip_grad_norm_
from torch import Tensor


def judge_without_zero(engine: deepspeed.DeepSpeedEngine) -> None:
    """Skip an update whose gradients are not finite, and tell their norm, as ZeRO's optimizers do.

    With stage 0 in fp32 DeepSpeed would apply it, and forget the norm that clipping measured. The
    gradients are reduced by then: all ranks find the same. `engine.py`, `_take_model_step`.
    """
    optimizer = engine.optimizer
    apply = optimizer.step

    def clip() -> None:
        norm = clip_grad_norm_(
            engine.module.parameters(), max_norm=engine.gradient_clipping(), mpu=engine.mpu
        )
        engine._global_grad_norm = norm
        optimizer.overflow = not torch.isfinite(norm).item()

    def step() -> None:
        if not optimizer.overflow:
            apply()

    engine.clip_fp32_gradients, optimizer.step = clip, step


def judge_by_the_norm(optimizer: Any) -> None:
    """Let the norm alone tell whether the gradients are finite: it is so where each of them is.

    ZeRO's step would read all gradients several times for that, and then judge the norm as well.
    `stage_1_and_2.py`, `step`.
    """
    if getattr(optimizer, "compute_grad_norm", False):  # ZeRO-1 of bf16 may have another optimizer
        optimizer.check_overflow = lambda partition_gradients=True: None


def reduce_in_place(optimizer: Any, world_size: int) -> None:
    """Reduce a bucket of gradients where it lies, and add what comes out in one reading.

    ZeRO divides the bucket by one where there is one rank; copies its pieces, which lie one behind
    the other, into a second buffer; adds up a float32 copy of each where bf16 would do; and copies
    the sums back into the bucket, where nobody reads them. `stage_1_and_2.py`, `average_tensor`,
    `allreduce_and_copy_with_multiple_ranks`.
    """
    copying = getattr(optimizer, "allreduce_and_copy_with_multiple_ranks", None)
    if copying is None:
        return
    if world_size == 1:
        optimizer.gradient_average = False

    def reduce(
        pieces: Sequence[Tensor],
        dtype: torch.dtype,
        log: Any = None,
        divide: bool = True,
        process_group: Any = None,
        bucket_ranks: Any = None,
        output_bucket: Any = None,
    ) -> None:
        group = optimizer.dp_process_group if process_group is None else process_group
        rank, whole = dist.get_rank(group), _joined(pieces)
        sums = output_bucket or [None] * len(pieces)
        own = [
            (piece, total)
            for piece, owners, total in zip(pieces, bucket_ranks, sums, strict=True)
            if rank in owners
        ]
        summed = all(total is not None for _, total in own)
        if whole is None or whole.dtype != dtype or divide or not summed:
            copying(pieces, dtype, log, divide, process_group, bucket_ranks, output_bucket)
            return
        if whole.is_cuda and optimizer.overlap_comm:
            whole.record_stream(optimizer.reduction_stream)
        dist.all_reduce(whole, group=group)
        for piece, total in own:
            total.add_(piece)

    optimizer.allreduce_and_copy_with_multiple_ranks = reduce


def reduce_without_the_host(optimizer: Any) -> None:
    """Let the card, not the host, wait for the gradients that are still on their way.

    With `overlap_comm` ZeRO's epilogue of each backward stops the host until the card has nothing
    left to do, and then the card until the host has queued the next micro-batch. That the stream
    of the next forward waits for the one of the reductions orders the same work.
    `stage_1_and_2.py`, `independent_gradient_partition_epilogue`.
    """
    stream = getattr(optimizer, "reduction_stream", None)
    epilogue = getattr(optimizer, "independent_gradient_partition_epilogue", None)
    if stream is None or epilogue is None or not optimizer.overlap_comm:
        return
    if not optimizer.contiguous_gradients:  # what is in no bucket is reduced after that wait
        return
    accelerator = get_accelerator()

    def ordered() -> None:
        wait, accelerator.synchronize = accelerator.synchronize, wait_for_reductions
        try:
            epilogue()
        finally:
            accelerator.synchronize = wait

    def wait_for_reductions(device_index: int | None = None) -> None:
        torch.cuda.current_stream(device_index).wait_stream(stream)

    optimizer.independent_gradient_partition_epilogue = ordered


def _joined(pieces: Sequence[Tensor]) -> Tensor | None:
    """All pieces as one tensor (elements,) in the same memory; None where they do not follow."""
    first = pieces[0]
    storage, expected = first.untyped_storage().data_ptr(), first.storage_offset()
    for piece in pieces:
        same = piece.dtype == first.dtype and piece.untyped_storage().data_ptr() == storage
        if not same or piece.storage_offset() != expected or not piece.is_contiguous():
            return None
        expected += piece.numel()
    return first.as_strided((expected - first.storage_offset(),), (1,))
