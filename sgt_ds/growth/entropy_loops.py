"""Methods `high_entropy_loop` and `low_entropy_loop`: given layers, heads narrowed in stages.

Paper, ablation protocol: in the first window ten heads are found, in the second two of them, then
the structure is frozen. With entry `decay` the heads that drop out fall from 1 to 0 over the
window and all heads are computed meanwhile; with `ramp` the first ten rise, and of them those that
drop out fall.
"""

from __future__ import annotations

from dataclasses import replace

from sgt_ds.config import Entry, GrowthConfig, ModelConfig
from sgt_ds.growth.clock import DecisionClock
from sgt_ds.growth.decision import Decision, Margin, Phase
from sgt_ds.growth.layers import given_layers
from sgt_ds.growth.ranking import head_margin, noise_note, rank_heads
from sgt_ds.growth.state import VANILLA, Loop, State
from sgt_ds.growth.statistics import Entropy


class EntropyLoop:
    """Narrows the looping heads of given layers to those of highest, or lowest, entropy."""

    def __init__(self, growth: GrowthConfig, model: ModelConfig, *, lowest: bool) -> None:
        self.entry: Entry = growth.entry
        self._clock = DecisionClock.of(growth)
        self._layers = given_layers(growth, model)
        self._loops, self._num_heads, self._lowest = growth.loops, model.num_heads, lowest
        # Θ tells the stage by its number of heads: a stage that narrows nothing is none.
        self._stages = sorted(
            {min(stage, model.num_heads) for stage in growth.stages}, reverse=True
        )

    def initial_state(self) -> State:
        """No loop before t_start."""
        return VANILLA

    def is_due(self, step: int, state: State) -> bool:
        """At each window until the last stage is done."""
        return not self._is_complete(state) and self._clock.is_due(step)

    def phase(self, step: int, state: State) -> Phase:
        """Fixed once the last stage has chosen its heads."""
        return self._clock.phase(step, self._is_complete(state))

    def decide(self, step: int, entropy: Entropy | None, state: State) -> Decision:
        """Take the next stage in every given layer at once."""
        usable = self._clock.usable(step, entropy, state, self._is_complete(state))
        if isinstance(usable, Decision):
            return usable
        stage = self._stage(state) + 1
        count = self._stages[stage]
        loops: dict[int, Loop] = {}
        margins: list[float] = []
        for layer in self._layers:
            old = state.loops.get(layer)
            pool = tuple(range(self._num_heads)) if old is None else old.heads or ()
            ranked = rank_heads(usable.mean[layer], pool, lowest=self._lowest)
            if (margin := head_margin(usable, layer, ranked, count)) is not None:
                margins.append(margin)
            loops[layer] = self._narrowed(old, step, ranked[:count], ranked[count:])
        after = State(loops)
        margin_of_all = Margin(head=min(margins, default=None))
        kind = "lowest" if self._lowest else "highest"
        reason = (
            f"stage {stage + 1} of {len(self._stages)}: the {count} heads of {kind} entropy "
            f"in each given layer{noise_note(margin_of_all)}"
        )
        last = stage > 0 and self._is_complete(after)
        return Decision(
            step,
            "freeze" if last else "activate",
            reason,
            self._layers,
            margin_of_all,
            state,
            after,
            self.phase(step, after),
        )

    def _narrowed(
        self, old: Loop | None, step: int, staying: tuple[int, ...], leaving: tuple[int, ...]
    ) -> Loop:
        heads = tuple(sorted(staying))
        # A head that has not looped yet need not fall where others rise.
        falls = self.entry == "decay" or (self.entry == "ramp" and old is not None)
        falling = tuple(sorted(leaving)) if falls else ()
        if old is None:
            return Loop(self._loops, heads, "attention", step, step, falling)
        # Only falling heads open a window of their own.
        entered = step if falling else old.entered
        return replace(old, heads=heads, entered=entered, leaving=falling)

    def _stage(self, state: State) -> int:
        """Index of the stage that Θ stands in; −1 before the first."""
        if not state.loops:
            return -1
        heads = next(iter(state.loops.values())).heads or ()
        return self._stages.index(len(heads))

    def _is_complete(self, state: State) -> bool:
        return self._stage(state) == len(self._stages) - 1


def high_entropy_loop(growth: GrowthConfig, model: ModelConfig) -> EntropyLoop:
    """Loops the heads of highest entropy."""
    return EntropyLoop(growth, model, lowest=False)


def low_entropy_loop(growth: GrowthConfig, model: ModelConfig) -> EntropyLoop:
    """Loops the heads of lowest entropy."""
    return EntropyLoop(growth, model, lowest=True)
