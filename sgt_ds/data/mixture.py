"""Which source each position of the global order takes its sequence from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# Proportions are exact in every window of this many sequences, wherever it starts.
PERIOD = 1000


def quotas(weights: Sequence[float]) -> list[int]:
    """Places of one period for each source, by largest remainder (ties: the earlier source).

    A source whose share rounds to nothing gets 0: the caller refuses it.
    """
    total = sum(weights)
    exact = [weight * PERIOD / total for weight in weights]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(weights)), key=lambda s: (counts[s] - exact[s], s))
    for source in by_remainder[: PERIOD - sum(counts)]:
        counts[source] += 1
    return counts


class Mixture:
    """A fixed pattern of `PERIOD` places, each source spread evenly over it, that repeats forever.

    A window of one period holds every place of the pattern once, so its proportions are exact.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.quotas = quotas(weights)
        places = [
            ((turn + 0.5) / quota, source)
            for source, quota in enumerate(self.quotas)
            for turn in range(quota)
        ]
        self.pattern = np.array([source for _, source in sorted(places)], dtype=np.int64)
        chosen = self.pattern[:, None] == np.arange(len(self.quotas))
        # before[p, s]: places of source s in the pattern's first p.
        self._before = np.zeros((PERIOD + 1, len(self.quotas)), dtype=np.int64)
        np.cumsum(chosen, axis=0, out=self._before[1:])

    def drawn(self, position: int) -> list[int]:
        """Sequences of each source among the first `position` of the global order."""
        periods, place = divmod(position, PERIOD)
        return [
            periods * quota + int(before)
            for quota, before in zip(self.quotas, self._before[place], strict=True)
        ]

    def position_of(self, source: int, turn: int) -> int:
        """Place in the global order of a source's sequence `turn` (from 0, over all epochs)."""
        periods, place = divmod(turn, self.quotas[source])
        return periods * PERIOD + int(np.flatnonzero(self.pattern == source)[place])

    def locate(
        self, positions: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """Source of each position, and how many sequences of that source stand before it.

        `positions`: int64 (n,). Returns two int64 arrays (n,).
        """
        periods, places = np.divmod(positions, PERIOD)
        sources = self.pattern[places]
        quota = np.asarray(self.quotas, dtype=np.int64)[sources]
        return sources, periods * quota + self._before[places, sources]
