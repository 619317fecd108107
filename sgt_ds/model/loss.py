"""Next-token loss from the last hidden states, without all logits at once. Knows no block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sgt_ds.model.norm import rms_norm

# Logits that exist at a time: half a GiB in bfloat16. With the paper's vocabulary that is 5,300
# tokens, enough to fill a GPU with one product.
CHUNK_ELEMENTS = 1 << 28

# Logits whose norm is taken at a time: few enough to be read once.
_BLOCK = 128

Function = TypeVar("Function", bound=Callable[..., Any])


class Prepare(Protocol):
    """What makes a function ready to run: compiles it, or gives it as it is."""

    def __call__(self, function: Function, /) -> Function: ...


def as_it_is(function: Function) -> Function:
    """The `Prepare` that compiles nothing."""
    return function


def logits_of(x: Tensor, norm: Tensor, head: Tensor, eps: float) -> Tensor:
    """Final norm and output matrix: (sequences, positions, rows of `head`), in the dtype of `x`."""
    return F.linear(rms_norm(x, norm, eps), head.to(x.dtype))


def next_token_loss(x: Tensor, norm: Tensor, head: Tensor, targets: Tensor, eps: float) -> Tensor:
    """Mean cross-entropy in nats over all positions, in at least float32, a scalar.

    `x`: floating (sequences, positions, d); `head`: (padded vocabulary, d); `targets`: int64
    (sequences, positions). Padding rows of the vocabulary take part in the softmax.
    """
    logits = logits_of(x, norm, head, eps).flatten(0, 1)
    precise = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(precise), targets.flatten())


def chunks_for(tokens: int, vocabulary: int) -> int:
    """Into how many chunks a micro-batch of `tokens` is cut: of one size, where few more do it.

    One size is one compiled graph, and what fills a GPU evenly if the batch does.
    """
    least = -(-tokens * vocabulary // CHUNK_ELEMENTS)
    return next((count for count in range(least, 2 * least) if tokens % count == 0), least)


def chunked_next_token_loss(
    normed: Tensor, head: Tensor, targets: Tensor, chunks: int, prepare: Prepare
) -> Tensor:
    """`next_token_loss` with the logits of one of `chunks` chunks in memory at a time.

    `normed`: floating (sequences, positions, d), after the final norm.
    """
    hidden, matrix, wanted = normed.flatten(0, 1), head.to(normed.dtype), targets.flatten()
    if not torch.is_grad_enabled():
        precise = torch.promote_types(hidden.dtype, torch.float32)
        sums = [
            F.cross_entropy(logits.to(precise), own, reduction="sum")
            for part, own in _chunks(chunks, hidden, wanted)
            for logits in (F.linear(part, matrix),)
        ]
        return torch.stack(sums).sum() / len(hidden)
    apply = cast(Callable[..., Tensor], _ChunkedLoss.apply)
    return apply(hidden, matrix, wanted, chunks, prepare)


def loss_chunk(
    hidden: Tensor, matrix: Tensor, wanted: Tensor, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Summed cross-entropy of some tokens, and its gradient by logit times `share`, in two parts.

    `hidden`: floating (tokens, d); `matrix`: (vocabulary, d); `wanted`: int64 (tokens, 1).
    Returns the sum in at least float32; softmax times `share`, (tokens, vocabulary); and what
    belongs in the place of `wanted`, (tokens, 1). Both in the dtype of `hidden`.
    """
    logits = F.linear(hidden, matrix)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # By blocks first: of a whole row, maximum and sum would each read all of it again.
    blocks = logits.view(len(hidden), -1, math.gcd(len(matrix), _BLOCK))
    log_norm = blocks.logsumexp(-1).logsumexp(-1, keepdim=True)
    log_likelihood = logits.gather(1, wanted) - log_norm
    softmax = (share * (logits - log_norm).exp()).to(hidden.dtype)
    return -log_likelihood.sum(), softmax, (share * log_likelihood.expm1()).to(hidden.dtype)


def _add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    """Add a product of two matrices to `total`, which may be float32 where they are bfloat16."""
    if total.dtype == first.dtype:
        total.addmm_(first, second)
    elif total.is_cuda:
        # Added where the product ends: it is neither rounded nor written by itself.
        torch.addmm(total, first, second, out_dtype=total.dtype, out=total)
    else:
        total += first @ second


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return (gradient.to(factor.dtype) * factor).to(dtype)


class _ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy whose gradients are taken in the forward pass, chunk by chunk.

    The loss is the last thing that the model computes, so its gradients are known up to one factor
    once the logits are: nothing has to be kept or computed twice. Same products as without chunks.
    """

    @staticmethod
    def forward(
        context: Any, hidden: Tensor, matrix: Tensor, wanted: Tensor, chunks: int, prepare: Prepare
    ) -> Tensor:
        chunk, precise = prepare(loss_chunk), torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=precise, device=hidden.device)
        # Added up over chunks in float32: bfloat16 would lose what a late chunk brings.
        matrix_gradient = torch.zeros_like(matrix, dtype=precise)
        hidden_gradient = torch.empty_like(hidden)
        rows = (hidden, wanted[:, None], hidden_gradient)
        for part, own, of_hidden in _chunks(chunks, *rows):
            loss, gradient, of_wanted = chunk(part, matrix, own, 1 / len(hidden))
            total += loss
            # Not in compiled code, which would compare each of the vocabulary with the wanted one.
            gradient.scatter_(1, own, of_wanted)
            _add_product(matrix_gradient, gradient.T, part)
            torch.mm(gradient, matrix, out=of_hidden)
        context.save_for_backward(hidden_gradient, matrix_gradient)
        context.prepare, context.dtype = prepare, matrix.dtype
        return total / len(hidden)

    @staticmethod
    @once_differentiable
    def backward(context: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        # Compiled: torch's own product with a factor on a GPU takes twice as long.
        scaled = context.prepare(_scaled)
        gradients = (scaled(each, factor, context.dtype) for each in context.saved_tensors)
        return *gradients, None, None, None


def _chunks(count: int, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(torch.tensor_split(each, count) for each in rows), strict=True)
