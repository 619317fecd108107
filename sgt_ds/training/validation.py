"""The validation loss in the loop: the same sequences each time, split over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from sgt_ds.model import LoopInputs


class ValidationLoss:
    """Mean loss over the validation sequences, with the loops of the moment.

    `batches`: gives this rank's samples, int64 (sequences, positions + 1), the same at each call.
    """

    def __init__(
        self, model: Any, batches: Callable[[], Iterable[torch.Tensor]], device: torch.device
    ) -> None:
        self._model, self._batches, self._device = model, batches, device

    def __call__(self, loops: Mapping[int, LoopInputs]) -> float:
        """Mean loss in nats per token. Collective."""
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        for sample in self._batches():
            sample = sample.to(self._device, non_blocking=True)
            # With gradients and entropies on, as in training: the compiled blocks of the training
            # step serve, and nothing is compiled a second time.
            output = self._model(sample[:, :-1], sample[:, 1:], loops=loops, measure=True)
            totals[0] += output.loss.detach().double() * len(sample)
            totals[1] += len(sample)
        dist.all_reduce(totals)
        return float(totals[0] / totals[1])
