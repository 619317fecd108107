"""Which part of a training step a kernel is, and how long each part had the device. Knows no torch.

A kernel is one on a GPU, or one operation on a CPU, where a compiled graph counts as one.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from typing import NamedTuple

PRODUCTS, ATTENTION, LOSS = "products", "attention", "loss"
COMPILED, EAGER, OPTIMIZER = "compiled", "eager", "optimizer"
COLLECTIVES, COPIES, OTHER, IDLE = "collectives", "copies", "other", "idle"

PARTS = {
    PRODUCTS: "matrix products",
    ATTENTION: "attention",
    COMPILED: "compiled pointwise and reductions",
    EAGER: "pointwise and others, not compiled",
    LOSS: "loss, without its products",
    OPTIMIZER: "optimizer",
    COLLECTIVES: "collectives",
    COPIES: "copies, fills, views",
    OTHER: "other",
    IDLE: "idle",
}
"""What a step is divided into, and how a table calls it."""

CPU_GRAPH = "## Call CompiledFxGraph"
"""A compiled graph on a CPU: its own code is what remains beside the operations that it calls."""

# The first that is found in a kernel's name names its part. Compiled kernels are called after all
# that was fused into them, also after attention and products that they only stand beside.
_NAMES = tuple(
    (part, re.compile(pattern))
    for part, pattern in (
        (LOSS, r"log_?softmax|LogSoftMax|logsumexp|nll_loss|cross_entropy"),
        (COMPILED, rf"^triton_(?!tem_)|^{CPU_GRAPH}"),
        (COLLECTIVES, r"nccl|^c10d::|gloo"),
        (
            ATTENTION,
            r"flash|fmha|sdpa|scaled_dot_product|flex_attention|flex_decoding|efficient_attention"
            r"|cudnn::fusion::",
        ),
        (OPTIMIZER, r"multi_tensor_apply|FusedAdam|_fused_adam|::_foreach_"),
        (
            PRODUCTS,
            r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitK|^triton_tem_fused\w*mm"
            r"|^aten::(linear|matmul|mm|addmm|bmm|baddbmm|mv|addmv|dot|einsum|_scaled_mm)_?$"
            r"|^(mkl|mkldnn)::_\w*linear",
        ),
        (
            COPIES,
            r"^Memcpy|^Memset|FillFunctor|copy_kernel|CatArrayBatchedCopy"
            r"|^aten::(copy|_to_copy|to|contiguous|clone|cat|stack|fill|zero|zeros|ones|full|empty"
            r"|zeros_like|ones_like|full_like|empty_like|empty_strided|new_zeros|new_empty"
            r"|new_empty_strided|detach|alias|t|transpose|permute|view|_unsafe_view|reshape|expand"
            r"|expand_as|slice|select|split|split_with_sizes|chunk|narrow|unbind|unsqueeze|squeeze"
            r"|flatten|as_strided|select_backward|slice_backward|promote_types|result_type)_?$",
        ),
        (
            EAGER,
            r"elementwise_kernel|reduce_kernel|softmax|SoftMax|rms_norm|layer_norm|RowwiseMoments"
            r"|[iI]ndex|[eE]mbedding|[gG]ather|[sS]catter|compute_grad_weight|segment|arange|cub::"
            r"|^aten::(_?fused_rms_norm(_backward)?|(add|sub|rsub|mul|div|neg|pow|sqrt|rsqrt|square"
            r"|exp|log|reciprocal|lerp|addcmul|addcdiv|silu|silu_backward|sigmoid|sigmoid_backward"
            r"|sum|mean|amax|abs|maximum|minimum|clamp|clamp_min|clamp_max|where|masked_fill|eq|ne"
            r"|lt|le|gt|ge|special_entr|item|isfinite|logical_and|norm|linalg_vector_norm|tril|triu"
            r"|cumsum)_?)$",
        ),
    )
)
# These go on while something else computes: what they hide costs nothing.
_GIVES_WAY = re.compile(rf"nccl|^{CPU_GRAPH}")

_OPTIMIZER_REGION = "Optimizer.step#"
_LOSS_REGION = "_ChunkedLoss"


class Work(NamedTuple):
    """One kernel."""

    name: str
    start: float
    end: float
    """In the unit of `start`, on one clock for all."""
    regions: tuple[str, ...] = ()
    """Names of what the host was in when it launched it."""


def part_of(work: Work) -> str:
    """The part of a kernel, by its name and, in the loss and the optimizer, by who launched it."""
    if any(region.startswith(_OPTIMIZER_REGION) for region in work.regions):
        return OPTIMIZER
    part = next((part for part, pattern in _NAMES if pattern.search(work.name)), OTHER)
    in_loss = any(region.startswith(_LOSS_REGION) for region in work.regions)
    return LOSS if in_loss and part != PRODUCTS else part


def own_times(work: Sequence[Work]) -> list[float]:
    """How much of the time in which anything ran each kernel is charged with; no moment twice.

    Where several run, the one that began first; collectives only where nothing else runs.
    """
    own = [0.0] * len(work)
    # At the same moment ends come before starts.
    edges = sorted(
        edge
        for index, each in enumerate(work)
        for edge in ((each.start, 1, index), (each.end, 0, index))
    )
    running: list[tuple[bool, float, int]] = []
    ended, last = set[int](), 0.0
    for moment, starts, index in edges:
        while running and running[0][2] in ended:
            heapq.heappop(running)
        if running:
            own[running[0][2]] += moment - last
        last = moment
        if starts:
            each = work[index]
            heapq.heappush(running, (bool(_GIVES_WAY.search(each.name)), each.start, index))
        else:
            ended.add(index)
    return own
