"""A prepared set as one long row of training sequences. Knows shards, no order and no mixture."""

from __future__ import annotations

import resource
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from sgt_ds.data.manifest import NAME, Manifest, read_manifest
from sgt_ds.data.remote import is_remote
from sgt_ds.data.shard_cache import ShardCache
from sgt_ds.data.shards import REMEDY, Shard
from sgt_ds.errors import UserError

# Mapped shards are kept up to this many, over all open sets: the kernel allows a process about
# 65,000 mappings, and each holds a file descriptor, of which others need this many.
MAPPED_SHARDS = 8192
OTHER_FILES = 512

Rows = Sequence[npt.NDArray[np.int64]] | npt.NDArray[np.int64]


class TokenSet:
    """Shards of one directory, memory-mapped when first read.

    A sequence of length N is N + 1 tokens, of which the last N are targets. Sequences are at stride
    N within a shard, so each token is a target once, save a shard's first one and what is left at
    its end, fewer than N.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        *,
        name: str | None = None,
        cache: ShardCache | None = None,
    ) -> None:
        """`name`: what the set is called, else its path. `cache`: fetches what `path` lacks yet."""
        self.path, self.manifest, self._cache = path, manifest, cache
        self.name = str(path) if name is None else name
        self.fingerprint = manifest.fingerprint
        self._shard_tokens = np.array([shard.tokens for shard in manifest.shards], dtype=np.int64)
        self._mapped: OrderedDict[int, Shard] = OrderedDict()
        self._ends: dict[int, npt.NDArray[np.int64]] = {}
        _OPEN_SETS.add(self)

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return self.manifest.tokenizer.vocab_size

    @property
    def tokens(self) -> int:
        """Tokens of all shards."""
        return self.manifest.tokens

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer's file, a copy of the one given to `data prepare`."""
        return self.path / self.manifest.tokenizer.file

    @property
    def tokenizer_sha256(self) -> str:
        """SHA-256 of the tokenizer's file, in hex."""
        return self.manifest.tokenizer.sha256

    def num_sequences(self, sequence_length: int) -> int:
        """Sequences of `sequence_length` positions that the shards hold."""
        return int(self._sequence_ends(sequence_length)[-1])

    def sequence(self, index: int, sequence_length: int) -> npt.NDArray[np.int64]:
        """Tokens of one sequence, int64 (sequence_length + 1,).

        Raises: IndexError; UserError where the shard is missing or is not the manifest's.
        """
        row = np.empty(sequence_length + 1, dtype=np.int64)
        self.read_into([row], np.array([index]))
        return row

    def read(self, indices: npt.NDArray[np.int64], sequence_length: int) -> npt.NDArray[np.int64]:
        """Sequences `indices`, int64 (n,), in that order: int64 (n, sequence_length + 1).

        Raises: as `sequence`.
        """
        rows = np.empty((len(indices), sequence_length + 1), dtype=np.int64)
        self.read_into(rows, indices)
        return rows

    def read_into(
        self,
        rows: Rows,
        indices: npt.NDArray[Any],
        document_starts: Rows | None = None,
    ) -> None:
        """Fill `rows`, each int64 (N + 1,), with the sequences `indices` (n,) of length N.

        `document_starts`: filled too, each int64 (N,), as `Shard.document_starts` of its inputs.
        """
        length = len(rows[0]) - 1 if len(indices) else 1
        places, starts = self._lie(indices, length)
        for number, (place, start) in enumerate(zip(places.tolist(), starts.tolist(), strict=True)):
            shard = self.shard(place)
            rows[number][:] = shard.tokens[start : start + length + 1]
            if document_starts is not None:
                document_starts[number][:] = shard.document_starts(start, length)

    def fetch_ahead(self, indices: npt.NDArray[Any], sequence_length: int) -> None:
        """Begin to fetch what the sequences `indices` need and is not here yet. Does not wait."""
        if self._cache is not None and len(indices):
            places, _ = self._lie(indices, sequence_length)
            self._cache.fetch_ahead(
                [self.manifest.shards[place] for place in dict.fromkeys(places.tolist())]
            )

    @property
    def is_remote(self) -> bool:
        """Whether shards are fetched when they are needed."""
        return self._cache is not None

    def close(self) -> None:
        """Fetch nothing more ahead. What is being fetched is finished or left out whole."""
        if self._cache is not None:
            self._cache.close()

    def shard(self, place: int) -> Shard:
        """The shard at `place` in the manifest, mapped.

        Raises: UserError where it is missing, damaged, or not the one that the manifest names.
        """
        shard = self._mapped.get(place)
        if shard is None:
            entry = self.manifest.shards[place]
            if self._cache is not None:
                self._cache.fetch(entry)
            room = max(1, _room_for_shards() // len(_OPEN_SETS))
            while len(self._mapped) >= room:
                self._mapped.popitem(last=False)
            shard = Shard(self.path / entry.file)
            header = shard.header
            if (header.tokens, header.documents) != (entry.tokens, entry.documents) or (
                header.tokenizer_sha256.hex() != self.tokenizer_sha256
            ):
                raise UserError(
                    shard.path,
                    "header",
                    f"does not match {NAME}; prepare the set again",
                )
            self._mapped[place] = shard
        return shard

    def check_ids(self, place: int, ids: npt.NDArray[Any]) -> None:
        """Raises: UserError where `ids`, of the shard at `place`, are more than the vocabulary.

        Shards here are held against no checksum at a start: this finds what no model can take.
        """
        highest = int(ids.max(initial=0))
        if highest >= self.vocab_size:
            raise UserError(
                self.path / self.manifest.shards[place].file,
                "tokens",
                f"holds id {highest}, but the tokenizer has {self.vocab_size} ids: the file is "
                "damaged; "
                f"run `sgt-ds data verify {self.path}`, and {REMEDY}",
            )

    def check_rows(self, rows: Rows, indices: npt.NDArray[Any]) -> None:
        """As `check_ids`, of the sequences `indices` that `read_into` filled `rows` with."""
        if not len(indices):
            return
        places, _ = self._lie(indices, len(rows[0]) - 1)
        for row, place in zip(rows, places.tolist(), strict=True):
            self.check_ids(place, row)

    def _lie(
        self, indices: npt.NDArray[Any], length: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Shard and first token of each sequence, int64 (n,) both."""
        ends = self._sequence_ends(length)
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < ends[-1]:
            raise IndexError(f"sequence outside 0 … {ends[-1] - 1}")
        places = np.searchsorted(ends, indices, side="right")
        before = np.concatenate([[0], ends])[places]
        return places, (indices - before) * length

    def _sequence_ends(self, sequence_length: int) -> npt.NDArray[np.int64]:
        ends = self._ends.get(sequence_length)
        if ends is None:
            if sequence_length < 1:
                raise ValueError("a sequence has at least one position")
            counts: npt.NDArray[Any] = np.maximum(self._shard_tokens - 1, 0) // sequence_length
            ends = self._ends[sequence_length] = np.cumsum(counts, dtype=np.int64)
        return ends


_OPEN_SETS: WeakSet[TokenSet] = WeakSet()


@cache
def _room_for_shards() -> int:
    """Shards that this process can keep mapped. Raises its own limit of files as far as it may:
    1,024 is usual, and C4 has as many shards.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAPPED_SHARDS + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MAPPED_SHARDS
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(soft - OTHER_FILES, soft // 4)


def open_token_set(location: Path | str, cache_dir: Path | None = None) -> TokenSet:
    """Open a prepared set. Its shards are mapped, and fetched, when they are first read.

    `location`: a directory, or a URL of fsspec's. `cache_dir`: where remote shards are kept; None
    is `sgt-ds` under the user's cache directory.
    Raises: UserError where `location` holds no finished set, its manifest is damaged, or the store
    cannot be reached.
    """
    if is_remote(str(location)):
        cache = ShardCache(str(location), cache_dir)
        return TokenSet(cache.directory, cache.manifest, name=cache.name, cache=cache)
    return TokenSet(Path(location), read_manifest(Path(location)))
