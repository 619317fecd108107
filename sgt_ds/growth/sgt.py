"""Method `sgt`, the growth operator: step, entropy and Θ in, Θ out. Paper, Algorithm 1.

Knows no model and no process group. Indices are 0-based.
"""

from __future__ import annotations

from dataclasses import replace

from sgt_ds.config import Entry, GrowthConfig, ModelConfig
from sgt_ds.errors import UserError
from sgt_ds.growth.clock import DecisionClock
from sgt_ds.growth.decision import Decision, Margin, Phase, stall
from sgt_ds.growth.ranking import (
    head_margin,
    layer_margin,
    noise_note,
    rank_heads,
    rank_layers,
)
from sgt_ds.growth.state import VANILLA, Loop, State
from sgt_ds.growth.statistics import Entropy


class SparseGrowing:
    """Grows one layer at a time, deep to shallow (or mirrored), from the entropies as they come."""

    def __init__(self, growth: GrowthConfig, model: ModelConfig) -> None:
        if not isinstance(growth.layers, int):
            raise UserError("configuration", "growth.layers", "method sgt takes a number of layers")
        self.entry: Entry = growth.entry
        self._clock = DecisionClock.of(growth)
        self._k_max, self._target, self._heads = growth.k_max, growth.layers, growth.heads
        self._deep_first = growth.direction == "d2s"
        self._excluded = frozenset(growth.exclude_layers)
        self._num_heads = model.num_heads

    def initial_state(self) -> State:
        """No loop before t_start."""
        return VANILLA

    def is_due(self, step: int, state: State) -> bool:
        """At each window until Θ is complete or frozen."""
        return not self._is_complete(state) and self._clock.is_due(step)

    def phase(self, step: int, state: State) -> Phase:
        """Fixed once L layers loop and the newest is as deep as K_max."""
        return self._clock.phase(step, self._is_complete(state))

    def decide(self, step: int, entropy: Entropy | None, state: State) -> Decision:
        """Deepen the growing layer, or activate the next one, or say why neither happens."""
        usable = self._clock.usable(step, entropy, state, self._is_complete(state))
        if isinstance(usable, Decision):
            return usable
        means = usable.layer_means()
        order = rank_layers(means, self._excluded)
        ranking = tuple((layer, means[layer]) for layer in order)
        candidates = order[: self._target]
        margin = Margin(layer=layer_margin(usable, order, self._target))
        growing = state.growing_layer
        if growing is not None and growing in candidates:
            loop = state.loops[growing]
            if loop.depth < self._k_max:
                deeper = replace(loop, depth=loop.depth + 1, entered=step, leaving=())
                after = state.with_loop(growing, deeper, growing)
                reason = (
                    f"still a candidate: layer {growing} goes from depth {loop.depth} "
                    f"to {deeper.depth} of {self._k_max}{noise_note(margin)}"
                )
                phase = self.phase(step, after)
                return Decision(
                    step, "deepen", reason, candidates, margin, state, after, phase, ranking
                )
        if len(state.loops) < self._target:
            chosen = self._next_layer(candidates, state)
            if chosen is not None:
                return self._activate(step, usable, state, chosen, candidates, margin, ranking)
            side = "shallower" if self._deep_first else "deeper"
            reason = f"no eligible layer: no candidate is {side} than all looping layers"
        else:
            reason = f"candidate gone: growing layer {growing} is not among the candidates"
        return stall(step, reason, state, self.phase(step, state), candidates, margin, ranking)

    def _next_layer(self, candidates: tuple[int, ...], state: State) -> int | None:
        if self._deep_first:
            below = min(state.loops, default=None)
            return max((c for c in candidates if below is None or c < below), default=None)
        above = max(state.loops, default=None)
        return min((c for c in candidates if above is None or c > above), default=None)

    def _activate(
        self,
        step: int,
        entropy: Entropy,
        state: State,
        layer: int,
        candidates: tuple[int, ...],
        margin: Margin,
        ranking: tuple[tuple[int, float], ...],
    ) -> Decision:
        ranked = rank_heads(entropy.mean[layer], range(self._num_heads))
        heads = tuple(sorted(ranked[: self._heads]))
        leaving = tuple(sorted(ranked[self._heads :])) if self.entry == "decay" else ()
        after = state.with_loop(layer, Loop(1, heads, "attention", step, step, leaving), layer)
        margin = replace(margin, head=head_margin(entropy, layer, ranked, self._heads))
        order = "deepest" if self._deep_first else "shallowest"
        reason = f"{order} candidate: layer {layer} starts to loop{noise_note(margin)}"
        return Decision(
            step,
            "activate",
            reason,
            candidates,
            margin,
            state,
            after,
            self.phase(step, after),
            ranking,
        )

    def _is_complete(self, state: State) -> bool:
        if len(state.loops) < self._target or state.growing_layer is None:
            return False
        return state.loops[state.growing_layer].depth >= self._k_max
