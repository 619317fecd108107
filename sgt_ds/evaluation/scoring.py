"""Log-likelihoods of continuations, batched by length. Knows ids and logits, no text.

A batch is the same whoever runs it, so its numbers are too: work is shared by handing out whole
batches, at any number of ranks, with the same result to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Logits: TypeAlias = Callable[[Tensor, int], Tensor]
"""Ids, int64 (rows, positions), and a first position, to logits (rows, positions − first,
vocabulary). Rows are padded on the right: a position must see no later one."""

# float32 log-probabilities that exist at a time: 256 MiB.
CHUNK_ELEMENTS = 1 << 26


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be scored: the last `targets` positions of `ids` are asked for these tokens."""

    ids: tuple[int, ...]
    """Context, and the continuation without its last token."""
    targets: tuple[int, ...]
    """The continuation."""


def request(context: Sequence[int], continuation: Sequence[int], positions: int) -> Request:
    """A continuation behind its context, which loses its beginning where both exceed `positions`.

    Raises: ValueError where the continuation is empty, or longer than `positions` by itself.
    """
    if not continuation:
        raise ValueError("its scored text has no token")
    if len(continuation) > positions:
        raise ValueError(
            f"its scored text has {len(continuation)} tokens, more than the model's {positions} "
            "positions"
        )
    whole = [*context, *continuation][:-1][-positions:]
    return Request(tuple(whole), tuple(continuation))


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one forward pass, longest first, with the requests that each of them answers."""

    rows: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Ids, and indices of requests."""


def plan_batches(requests: Sequence[Request], batch_tokens: int) -> list[Batch]:
    """Batches of at most `batch_tokens` padded tokens (or one row), longest first.

    Requests with the same input share a row: of a question whose choices are letters, one pass
    scores all of them.
    """
    sharing: dict[tuple[int, ...], list[int]] = {}
    for index, one in enumerate(requests):
        sharing.setdefault(one.ids, []).append(index)
    rows = sorted(sharing.items(), key=lambda row: (-len(row[0]), row[1][0]))
    batches: list[Batch] = []
    taken: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for ids, indices in rows:
        if taken and len(taken[0][0]) * (len(taken) + 1) > batch_tokens:
            batches.append(Batch(tuple(taken)))
            taken = []
        taken.append((ids, tuple(indices)))
    return [*batches, Batch(tuple(taken))] if taken else batches


def token_log_probabilities(
    batch: Batch, requests: Sequence[Request], logits: Logits, device: torch.device
) -> dict[int, list[float]]:
    """Log-probability, in nats, of each target of the batch's requests, by index of request.

    Log-softmax in float32 (float64 logits: float64).
    """
    width = len(batch.rows[0][0])
    inputs = torch.zeros(len(batch.rows), width, dtype=torch.int64)
    first = width
    for row, (ids, indices) in enumerate(batch.rows):
        inputs[row, : len(ids)] = torch.tensor(ids)
        first = min(first, len(ids) - max(len(requests[index].targets) for index in indices))
    with torch.no_grad():
        answers = logits(inputs.to(device), first)
    found: dict[int, list[float]] = {}
    for row, (ids, indices) in enumerate(batch.rows):
        for index in indices:
            targets = torch.tensor(requests[index].targets, device=answers.device)
            begin = len(ids) - len(targets) - first
            found[index] = _gathered(answers[row, begin : begin + len(targets)], targets)
    return found


def _gathered(logits: Tensor, targets: Tensor) -> list[float]:
    """Log-probabilities of `targets` (n,) under `logits` (n, vocabulary), some rows at a time."""
    step = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    values: list[float] = []
    for start in range(0, len(targets), step):
        part, own = logits[start : start + step], targets[start : start + step]
        precise = part.to(torch.promote_types(part.dtype, torch.float32))
        log_probabilities = precise.log_softmax(-1).gather(-1, own[:, None])
        values += log_probabilities.squeeze(-1).tolist()
    return values


def log_likelihoods(
    requests: Sequence[Request],
    batches: Iterable[Batch],
    logits: Logits,
    device: torch.device,
    *,
    on_batch: Callable[[int], None] = lambda _: None,
) -> dict[int, float]:
    """Sum of each request's log-probabilities, for the requests of these batches, by index.

    `on_batch` hears how many requests a batch answered.
    """
    found: dict[int, float] = {}
    for batch in batches:
        values = token_log_probabilities(batch, requests, logits, device)
        found |= {index: math.fsum(each) for index, each in values.items()}
        on_batch(len(values))
    return found
