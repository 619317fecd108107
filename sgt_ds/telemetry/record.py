"""What the trainer reports about an update. Plain values: knows no torch, no server, no file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgt_ds.growth import State


@dataclass(frozen=True, slots=True)
class Totals:
    """What the run has spent so far, across resumes. The host knows it at every update."""

    tokens: int
    flops: int
    vanilla_flops: int
    not_finite: int
    source_tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One logged update. Cumulative values count from the run's first update, across resumes."""

    step: int
    """Applied updates."""
    tokens: int
    """Tokens consumed so far, those of skipped updates too."""
    loss: float
    """Mean loss of this update's global batch, nats per token."""
    learning_rate: float
    """Learning rate of this update."""
    grad_norm: float
    """Global L2 norm of the gradients before clipping."""
    step_seconds: float
    """Duration of this update."""
    tokens_per_second: float
    """Tokens per second of all ranks together."""
    flops: int
    """FLOPs spent so far."""
    vanilla_flops: int
    """FLOPs that the same tokens cost without loops."""
    overhead_ratio: float
    """(flops − vanilla_flops) / vanilla_flops."""
    flops_per_token: int
    """FLOPs of one token with the current loops."""
    mfu_ratio: float | None
    """Share of the devices' peak in use, 0–1; None where the peak is unknown."""
    data_wait_seconds: float
    """Seconds that this process has waited for data."""
    skipped_steps: int
    """Updates skipped so far."""
    phase: str
    """warmup, growing or fixed."""
    loops: State
    """Θ, the architectural state."""
    entropy: Sequence[Sequence[float]] | None
    """Normalized entropies [layer][head], 0–1 or NaN; None before the first measurement."""
    layer_stderr: Sequence[float] | None = None
    """Standard error of each layer's mean entropy, or NaN; None before the first measurement."""
    not_finite: int = 0
    """Measured updates so far in which some head's entropy was not finite."""
    source_tokens: Mapping[str, int] = field(default_factory=dict)
    """Target tokens taken from each source so far, by its name."""
    planned_overhead_ratio: float | None = None
    """What overhead_ratio is planned to be at this step; None where no plan is known."""

    @property
    def totals(self) -> Totals:
        """What has been spent up to this update."""
        return Totals(
            tokens=self.tokens,
            flops=self.flops,
            vanilla_flops=self.vanilla_flops,
            not_finite=self.not_finite,
            source_tokens=self.source_tokens,
        )

    def as_metrics_row(self) -> dict[str, Any]:
        """The row of metrics.jsonl. What is not finite becomes null: JSON has no word for it."""
        row: dict[str, Any] = {
            "step": self.step,
            "tokens": self.tokens,
            "loss": self.loss,
            "learning_rate": self.learning_rate,
            "grad_norm": self.grad_norm,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "flops": self.flops,
            "overhead_ratio": self.overhead_ratio,
            "phase": self.phase,
        }
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
