"""What the terminal view shows, as one value. Knows neither where it came from nor how it looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer. `cells`: entropies to draw from left to right, NaN where there is none."""

    cells: Sequence[float]
    entropy: float | None
    """Newest mean over the heads, 0–1."""
    depth: int = 0
    """How many times it loops."""
    heads: Sequence[int] | None = ()
    """Heads that loop; None means all of them."""


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank as its exporter tells it. `step` None: it does not answer."""

    rank: int
    step: int | None = None
    quiet_seconds: float | None = None
    """Since its newest update."""
    work_seconds: float | None = None
    """Its own work in an update, mean since its process began: updates last as long on all ranks."""


@dataclass(frozen=True, slots=True)
class RunView:
    """A run at one moment. None and NaN stand for what is not known."""

    name: str
    method: str
    state: str
    """`running`, `completed`, …, how it ended, or a word on how old the newest news is."""
    step: int
    steps: int | None
    phase: str | None
    losses: Sequence[float]
    """Training losses, oldest first, nats per token."""
    validation_loss: float | None
    learning_rate: float | None
    grad_norm: float | None
    tokens: float | None
    tokens_per_second: float | None
    overhead_ratio: float | None
    planned_overhead_ratio: float | None
    mfu_ratio: float | None
    layers: Sequence[LayerView]
    cells_mean: str
    """What a layer's cells are: `steps 0 to 250`, `heads`."""
    known_ranks: int = 0
    """How many ranks the run has; 0 where no one says."""
    ranks: Sequence[RankView] = ()
    """Those that were asked."""
    is_over: bool = False
    """Whether no one trains it any more."""

    @property
    def seconds_left(self) -> float | None:
        """Time to the last update at the speed of now; None where it is unknown or none comes."""
        if self.is_over and self.step != self.steps:
            return None
        if not (self.steps and self.step and self.tokens and self.tokens_per_second):
            return None
        return (self.steps - self.step) * self.tokens / self.step / self.tokens_per_second
