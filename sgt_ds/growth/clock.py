"""When a policy decides: the clock of applied updates. Pure; paper, Algorithm 1, line 14."""

from __future__ import annotations

from dataclasses import dataclass

from sgt_ds.config import GrowthConfig
from sgt_ds.growth.decision import Decision, Phase, freeze, stall
from sgt_ds.growth.state import State
from sgt_ds.growth.statistics import Entropy


@dataclass(frozen=True, slots=True)
class DecisionClock:
    """Windows, in applied updates: `t_start`, `t_start + interval`, …; none from `freeze_at` on."""

    t_start: int
    interval: int
    freeze_at: int | None

    @classmethod
    def of(cls, growth: GrowthConfig) -> DecisionClock:
        """The clock that a configuration asks for."""
        return cls(growth.t_start, growth.interval, growth.freeze_at)

    def is_due(self, step: int) -> bool:
        """Whether something is decided at `step`: a window, or the one decision to freeze."""
        if self.freeze_at is not None and step >= self.freeze_at:
            return step == self.freeze_at
        return step >= self.t_start and (step - self.t_start) % self.interval == 0

    def phase(self, step: int, complete: bool) -> Phase:
        """`complete`: whether Θ can't change any more."""
        if complete or (self.freeze_at is not None and step >= self.freeze_at):
            return "fixed"
        return "warmup" if step < self.t_start else "growing"

    def usable(
        self, step: int, entropy: Entropy | None, state: State, complete: bool
    ) -> Entropy | Decision:
        """The entropy to rank by; or a decision that needs none: freeze, or stall without it."""
        if self.freeze_at is not None and step >= self.freeze_at:
            return freeze(step, f"freeze_at: growth was to stop at step {self.freeze_at}", state)
        if entropy is None:
            reason = "not measured: this step's entropies were not measured; see entropy_every"
            return stall(step, reason, state, self.phase(step, complete))
        if (place := entropy.first_not_finite()) is not None:
            layer, head = place
            reason = f"not finite: the entropy of layer {layer}, head {head} is not finite"
            return stall(step, reason, state, self.phase(step, complete))
        return entropy
