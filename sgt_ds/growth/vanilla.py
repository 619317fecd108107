"""Method `vanilla`: no loops. Its entropies are still measured and journalled."""

from __future__ import annotations

from sgt_ds.config import Entry, GrowthConfig, ModelConfig
from sgt_ds.growth.decision import Decision, Phase, stall
from sgt_ds.growth.state import VANILLA, State
from sgt_ds.growth.statistics import Entropy


class Static:
    """A Θ that holds from step 0 on and never changes."""

    entry: Entry = "none"

    def __init__(self, state: State) -> None:
        self._state = state

    def initial_state(self) -> State:
        """Θ of the whole run."""
        return self._state

    def is_due(self, step: int, state: State) -> bool:
        """Never."""
        return False

    def decide(self, step: int, entropy: Entropy | None, state: State) -> Decision:
        """Nothing to decide."""
        return stall(step, "static: this method's loops never change", state, "fixed")

    def phase(self, step: int, state: State) -> Phase:
        """Fixed from step 0."""
        return "fixed"


def vanilla(growth: GrowthConfig, model: ModelConfig) -> Static:
    """The policy without loops."""
    return Static(VANILLA)
