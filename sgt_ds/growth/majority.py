"""Which ranks hold something else than most of them. Knows not what, nor how it was gathered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeVar

Held = TypeVar("Held", bound=Hashable)


def odd_ranks(held: Sequence[Held]) -> tuple[list[int], Held]:
    """The ranks that differ from most, and what most hold. `held`: by rank.

    Without a majority the lowest rank among the most numerous is right.
    """
    counted = Counter(held)
    most = max(held, key=lambda each: counted[each])  # the first of equal counts
    return [rank for rank, each in enumerate(held) if each != most], most
