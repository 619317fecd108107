"""A keyed permutation of 0 … n−1 without a table: an order of any size, at no start-up cost.

Knows numbers only. An index is split into two digits (a, b) of radices A·B ≥ n; rounds of a Feistel
network add to one digit a keyed hash of the other. Results ≥ n are permuted again (cycle walking),
which happens to fewer than one index in √n. Black & Rogaway, "Ciphers with Arbitrary Finite
Domains".
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

ROUNDS = 8
# Arrays of this many indices stay in the cache through all rounds.
CHUNK = 1 << 14
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # SplitMix64
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(32))


class Permutation:
    """A bijection of 0 … size−1, a pure function of `size` and `key` (any number of integers)."""

    def __init__(self, size: int, *key: int) -> None:
        if not 0 < size < 1 << 62:
            raise ValueError(f"size {size} is outside 1 … 2^62 − 1")
        self.size = size
        self._a = math.isqrt(size - 1) + 1
        self._b = -(-size // self._a)
        text = ",".join(str(part) for part in key).encode()
        self._keys = np.frombuffer(
            hashlib.blake2b(text, digest_size=8 * ROUNDS, person=b"sgt-order-v1").digest(),
            dtype="<u8",
        ).astype(np.uint64)

    def __call__(self, indices: npt.NDArray[Any]) -> Indices:
        """Images of `indices`, integers (n,) in 0 … size−1. Returns int64 (n,).

        Raises: IndexError where an index lies outside.
        """
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self.size:
            raise IndexError(f"index outside 0 … {self.size - 1}")
        images = np.empty(len(indices), dtype=np.int64)
        for start in range(0, len(indices), CHUNK):
            piece = indices[start : start + CHUNK].astype(np.uint64)
            piece = self._rounds(piece)
            while len(outside := np.flatnonzero(piece >= self.size)):
                piece[outside] = self._rounds(piece[outside])
            images[start : start + CHUNK] = piece
        return images

    def _rounds(self, indices: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        radix_a, radix_b = np.uint64(self._a), np.uint64(self._b)
        a: npt.NDArray[np.uint64] = indices // radix_b
        b = indices - a * radix_b
        for turn in range(0, ROUNDS, 2):
            a += _below(_mixed(b, self._keys[turn]), radix_a)
            # Below the radix the difference wraps to a huge number: the minimum is a mod radix.
            np.minimum(a, a - radix_a, out=a)
            b += _below(_mixed(a, self._keys[turn + 1]), radix_b)
            np.minimum(b, b - radix_b, out=b)
        a *= radix_b
        a += b
        return a


def _mixed(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """Keyed SplitMix64 finaliser; its upper 32 bits are shifted down."""
    mixed = values ^ key
    mixed ^= mixed >> _SHIFTS[0]
    mixed *= _MULTIPLIERS[0]
    mixed ^= mixed >> _SHIFTS[1]
    mixed *= _MULTIPLIERS[1]
    mixed >>= _SHIFTS[2]
    return mixed


def _below(values: npt.NDArray[np.uint64], bound: np.uint64) -> npt.NDArray[np.uint64]:
    """Map 32-bit values to 0 … bound−1 without a division."""
    values *= bound
    values >>= _SHIFTS[2]
    return values
