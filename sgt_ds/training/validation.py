"""The validation loss in the loop: the same sequences each time, split over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from sgt_ds.data import MicroBatch
from sgt_ds.model import LoopInputs


class ValidationLoss:
    """Mean loss over the validation sequences, with the loops of the moment.

    `batches`: gives this rank's samples, the same at each call.
    """

    def __init__(
        self, model: Any, batches: Callable[[], Iterable[MicroBatch]], device: torch.device
    ) -> None:
        self._model, self._batches, self._device = model, batches, device

    def __call__(self, loops: Mapping[int, LoopInputs]) -> float:
        """Mean loss in nats per token. Collective."""
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        for sample in self._batches():
            tokens, document_starts = sample.to(self._device)
            # With gradients and entropies on, as in training: the compiled blocks of the training
            # step serve, and nothing is compiled a second time.
            output = self._model(
                tokens[:, :-1],
                tokens[:, 1:],
                loops=loops,
                measure=True,
                document_starts=document_starts,
            )
            totals[0] += output.loss.detach().double() * len(tokens)
            totals[1] += len(tokens)
        dist.all_reduce(totals)
        return float(totals[0] / totals[1])
