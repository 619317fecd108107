"""What a run amounts to at the moment, for its reports. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from sgt_ds.data import Loader
from sgt_ds.flops import FlopsCounter
from sgt_ds.growth import GrowthController
from sgt_ds.telemetry import StepRecord, Totals
from sgt_ds.training.faults import SkippedSteps
from sgt_ds.training.parts import StepParts
from sgt_ds.training.totals import StepTotals


@dataclass
class Clock:
    """How far a run has come. `step` counts applied updates only: it is the growth clock.

    `tokens`: of all consumed batches, skipped ones too.
    """

    step: int = 0
    tokens: int = 0


class AppliedUpdate(NamedTuple):
    """What an applied update leaves for its report."""

    totals: StepTotals
    rate: float
    seconds: float
    grad_norm: Any
    """A float or a tensor of the device, which need not have it yet; None where unknown."""


class Figures:
    """Reads the parts of a run that its trainer moves on."""

    def __init__(
        self,
        clock: Clock,
        *,
        loader: Loader,
        growth: GrowthController,
        flops: FlopsCounter,
        parts: StepParts,
        skips: SkippedSteps,
        peak_flops: float | None,
        planned_overhead: Callable[[int], float],
    ) -> None:
        """`peak_flops`: of all devices together, None where unknown. `planned_overhead`: the
        cumulative FLOPs overhead that is planned at a step.
        """
        self._clock, self._loader, self._growth = clock, loader, growth
        self._flops, self._parts, self._skips = flops, parts, skips
        self._peak_flops, self._planned_overhead = peak_flops, planned_overhead

    def part_seconds(self) -> dict[str, float]:
        """By phase of an update, as far as the device has passed them; the wait for data too."""
        return {**self._parts.seconds(), "data": self._loader.wait_seconds}

    def totals(self) -> Totals:
        """What the run has spent."""
        return Totals(
            tokens=self._clock.tokens,
            flops=self._flops.total,
            vanilla_flops=self._flops.vanilla,
            not_finite=self._growth.not_finite,
            source_tokens=self._loader.source_tokens,
        )

    def record(self, update: AppliedUpdate, loss: float, speed: float) -> StepRecord:
        """The newest update as it is reported. `loss`: of all ranks. `speed`: tokens per second."""
        flops, growth, clock = self._flops, self._growth, self._clock
        entropy, norm = growth.entropy, update.grad_norm
        peak = self._peak_flops
        return StepRecord(
            step=clock.step,
            tokens=clock.tokens,
            loss=loss,
            learning_rate=update.rate,
            grad_norm=float(norm) if norm is not None else float("nan"),
            step_seconds=update.seconds,
            tokens_per_second=speed,
            flops=flops.total,
            vanilla_flops=flops.vanilla,
            overhead_ratio=flops.overhead_ratio,
            flops_per_token=flops.per_token,
            mfu_ratio=speed * flops.per_token / peak if peak else None,
            data_wait_seconds=self._loader.wait_seconds,
            source_tokens=self._loader.source_tokens,
            skipped_steps=self._skips.total,
            phase=growth.phase(clock.step),
            loops=growth.state,
            entropy=entropy.mean if entropy is not None else None,
            layer_stderr=entropy.layer_stderr() if entropy is not None else None,
            not_finite=growth.not_finite,
            planned_overhead_ratio=self._planned_overhead(clock.step),
        )
