"""Which sequence is at which position of a run: a pure function of seed and position. No files.

Sequence p of the run (global batch p // G, row p mod G) is found from the seed and p alone: the
mixture gives its source and its number there, a keyed permutation its place in the source's epoch.
Nothing is stored, so resuming anywhere costs nothing, and how many ranks share a batch changes
nothing about what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sgt_ds.data.mixture import Mixture
from sgt_ds.data.permutation import Permutation

ORDER_VERSION = 1


class GlobalOrder:
    """Which sequence stands where in the run: positions in, (source, sequence) out."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.sizes, self.seed = list(sizes), seed
        self.mixture = Mixture(weights)
        self._permutations: dict[tuple[int, int], Permutation] = {}

    def locate(
        self, positions: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Source and sequence number of each position. All arrays int64 (n,)."""
        sources, turns = self.mixture.locate(positions)
        sequences = np.empty_like(turns)
        for source in np.unique(sources):
            of_source = np.flatnonzero(sources == source)
            epochs, places = np.divmod(turns[of_source], self.sizes[source])
            for epoch in np.unique(epochs):
                of_epoch = np.flatnonzero(epochs == epoch)
                permutation = self._permutation(int(source), int(epoch))
                sequences[of_source[of_epoch]] = permutation(places[of_epoch])
        return sources, sequences

    def _permutation(self, source: int, epoch: int) -> Permutation:
        found = self._permutations.get((source, epoch))
        if found is None:
            if len(self._permutations) > 4 * len(self.sizes):
                self._permutations.clear()
            found = Permutation(self.sizes[source], self.seed, source, epoch)
            self._permutations[source, epoch] = found
        return found
