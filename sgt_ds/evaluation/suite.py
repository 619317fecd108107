"""Several tasks for one model: requests planned once, then scored repeatedly.

Knows no file and no process group: who shares the work hands batches out and adds up the vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from sgt_ds.evaluation.encoding import Encoder, requests_of
from sgt_ds.evaluation.results import TaskResult, task_result
from sgt_ds.evaluation.scoring import Logits, Request, log_likelihoods, plan_batches
from sgt_ds.evaluation.sources import Questions

BATCH_TOKENS = 4096


class Suite:
    """Tasks, cut into tokens and batches.

    `positions`: the longest input. `batch_tokens`: padded tokens of one pass, at most.
    Raises: UserError where a question can't be asked.
    """

    def __init__(
        self,
        questions: Sequence[Questions],
        encoder: Encoder,
        *,
        positions: int,
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        self.questions = list(questions)
        self.requests: list[Request] = []
        self._ends: list[int] = []
        for each in self.questions:
            self.requests += requests_of(each, encoder, positions)
            self._ends.append(len(self.requests))
        self.batches = plan_batches(self.requests, batch_tokens)

    def score(
        self,
        logits: Logits,
        device: torch.device,
        *,
        share: slice = slice(None),
        on_batch: Callable[[int], None] = lambda _: None,
    ) -> torch.Tensor:
        """Log-likelihood of each request, float64 on the CPU, 0 where it is not in the share.

        `share`: which batches, as `slice(rank, None, world_size)`; the vectors of all ranks add up
        to the whole, exactly.
        """
        values = torch.zeros(len(self.requests), dtype=torch.float64)
        found: Mapping[int, float] = log_likelihoods(
            self.requests, self.batches[share], logits, device, on_batch=on_batch
        )
        for index, value in found.items():
            values[index] = value
        return values

    def results(self, values: torch.Tensor) -> list[TaskResult]:
        """Results of the tasks, in order, from the log-likelihood of each request."""
        starts = [0, *self._ends[:-1]]
        return [
            task_result(each, values[start:end].tolist())
            for each, start, end in zip(self.questions, starts, self._ends, strict=True)
        ]
