"""The validation loss in the loop: the same sequences each time, split over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sgt_ds.data import MicroBatch
from sgt_ds.model import LoopInputs
from sgt_ds.training.engine import Ranks
from sgt_ds.training.heartbeat import Heartbeat


class ValidationLoss:
    """Mean loss over the validation sequences, with the loops of the moment.

    `batches`: gives this rank's samples, the same at each call.
    """

    def __init__(
        self,
        model: Any,
        batches: Callable[[], Iterable[MicroBatch]],
        ranks: Ranks,
        heartbeat: Heartbeat,
    ) -> None:
        self._model, self._batches = model, batches
        self._ranks, self._heartbeat = ranks, heartbeat

    def __call__(self, loops: Mapping[int, LoopInputs]) -> float:
        """Mean loss in nats per token. Collective."""
        device = self._ranks.device
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        for sample in self._batches():
            tokens, document_starts = sample.to(device)
            loss = self._loss(tokens, loops, document_starts)
            totals[0] += loss.double() * len(tokens)
            totals[1] += len(tokens)
        totals = totals.cpu()  # here this rank's own work ends
        with self._heartbeat.waiting():
            dist.all_reduce(totals, group=self._ranks.host_group)
        return float(totals[0] / totals[1])

    def _loss(
        self, tokens: Tensor, loops: Mapping[int, LoopInputs], document_starts: Tensor | None
    ) -> Tensor:
        """Mean loss of one micro-batch, without its graph: two of them would not fit a GPU that one
        training step fills.

        With gradients and entropies on, as in training: the compiled blocks of the training step
        serve, and nothing is compiled a second time.
        """
        output = self._model(
            tokens[:, :-1],
            tokens[:, 1:],
            loops=loops,
            measure=True,
            document_starts=document_starts,
        )
        loss: Tensor = output.loss.detach()
        return loss
