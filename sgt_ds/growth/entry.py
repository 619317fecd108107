"""How a loop enters: from Θ and the step to the passes that a model runs. Pure.

Entry factors as in the paper's FLOPs (`decay`), without any (`none`), or rising (`ramp`).
"""

from __future__ import annotations

from dataclasses import dataclass

from sgt_ds.config import Entry
from sgt_ds.growth.state import Loop, Scope, State


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes of one looping layer in one update.

    `heads`: ascending indices of the heads that are computed; None means all of them.
    `scale`: one factor per pass and computed head, shape (depth, heads), in [0, 1];
    None means that no factor is applied. Its values change each step of a window, its shape and
    its presence only at a window's edges: a compiled block depends on `kind`, never on values.
    """

    depth: int
    scope: Scope
    heads: tuple[int, ...] | None
    scale: tuple[tuple[float, ...], ...] | None

    @property
    def kind(self) -> tuple[int, Scope, int | None, bool]:
        """What a compiled block depends on: of heads their number, of factors whether there are."""
        heads = None if self.heads is None else len(self.heads)
        return self.depth, self.scope, heads, self.scale is not None

    def head_count(self, num_heads: int) -> int:
        """How many heads one pass computes."""
        return num_heads if self.heads is None else len(self.heads)


def is_narrow(depth: int, heads: int, num_heads: int, *, scaled: bool) -> bool:
    """Whether `depth` passes of attention over `heads` heads are computed in the heads' own space.

    With c = heads × head size, passes one by one cost 4·depth·c·d multiplications a token, there it
    is 5·c·d + 4·(depth − 1)·c²: fewer wherever half of the heads or fewer loop more than once. A
    single pass with factors (`scaled`) is computed there too, so that a second one whose factor is
    still 0 changes no bit.
    """
    return (depth > 1 or scaled) and 2 * heads <= num_heads


def passes_at(
    state: State, step: int, *, entry: Entry, interval: int, num_heads: int
) -> dict[int, Passes]:
    """What each looping layer runs in the update after `step` applied updates.

    `interval`: updates of an entry window (Δt). The u-th update after a decision (u = 0, 1, …)
    has the factor 1 − u/Δt on the heads that leave, and with ramp u/Δt on each new pass.
    """
    return {
        layer: _passes(loop, (step - loop.entered) / interval, entry, num_heads)
        for layer, loop in state.loops.items()
    }


def _passes(loop: Loop, elapsed: float, entry: Entry, num_heads: int) -> Passes:
    """`elapsed`: windows since the loop's newest decision; in [0, 1) while it enters."""
    if loop.scope == "block" or loop.heads is None:
        return Passes(loop.depth, loop.scope, None, None)
    falling = 1.0 - elapsed
    if entry == "ramp":
        # The factor tensor stays after the window, all ones: no new kind of block then.
        if elapsed < 1 and loop.leaving:
            heads = tuple(sorted(loop.heads + loop.leaving))
            factors = tuple(falling if head in loop.leaving else 1.0 for head in heads)
            return Passes(loop.depth, loop.scope, heads, (factors,) * loop.depth)
        rising = (min(1.0, elapsed),) * len(loop.heads)
        whole = (1.0,) * len(loop.heads)
        # The decision that activates a layer brings all of its passes, a later one the last.
        earlier = 0 if loop.entered == loop.step else loop.depth - 1
        scale = (whole,) * earlier + (rising,) * (loop.depth - earlier)
        return Passes(loop.depth, loop.scope, loop.heads, scale)
    if entry == "decay" and elapsed < 1 and loop.leaving:
        staying, leaving = set(loop.heads), set(loop.leaving)
        factors = tuple(
            1.0 if head in staying else falling if head in leaving else 0.0
            for head in range(num_heads)
        )
        return Passes(loop.depth, loop.scope, None, (factors,) * loop.depth)
    if len(loop.heads) == num_heads:
        return Passes(loop.depth, loop.scope, None, None)
    return Passes(loop.depth, loop.scope, loop.heads, None)
