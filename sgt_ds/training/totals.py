"""Sums of one update over its micro-batches: sums and counts, never averages of averages."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sgt_ds.model import Output


class StepTotals:
    """Loss and entropy sums of one rank over the micro-batches of one update.

    `loss`: float32 scalar on the device, sum of the micro-batches' means.
    `entropy`: float64 (layers, heads, 3) on the device: sum, sum of squares and count over
    sequences; None where the update is not measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), device=device)
        self.entropy: torch.Tensor | None = None
        self._micro_batches = 0

    def add(self, output: Output) -> None:
        """Add one micro-batch."""
        assert output.loss is not None
        self.loss += output.loss.detach()
        self._micro_batches += 1
        if output.entropy is not None:
            sums = output.entropy.detach()
            self.entropy = sums if self.entropy is None else self.entropy + sums

    def mean_loss(self) -> float:
        """Mean loss of the global batch: every micro-batch has the same number of tokens.

        Collective, and waits for the device: for steps that are logged.
        """
        mean = self.loss.double() / self._micro_batches
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()
