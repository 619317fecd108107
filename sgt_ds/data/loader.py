"""Global batches in one order for every world size, prefetched. Knows token sets, no model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sgt_ds.config import DataSource
from sgt_ds.data.checks import check_same_tokenizer, check_sequence_length
from sgt_ds.data.mixture import PERIOD
from sgt_ds.data.order import ORDER_VERSION, GlobalOrder
from sgt_ds.data.prefetch import MicroBatch, Prefetch
from sgt_ds.data.token_set import TokenSet, open_token_set
from sgt_ds.errors import UserError

# Preparation shares this package and needs no torch: the functions that need it import it.

Exhausted = Literal["repeat", "stop"]
_Arrays = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]


class Loader:
    """One rank's share of every global batch.

    Micro-batch j of rank r takes rows j·W·m + r·m … + m − 1 of the batch (W ranks, micro-batch m),
    so the micro-batches j of all ranks together are consecutive rows.

    Raises: UserError where a set is missing or unfinished, holds no sequence of that length, was
    made by another tokenizer than the first, or has a weight below one in a thousand.
    """

    def __init__(
        self,
        sources: Sequence[DataSource],
        sequence_length: int,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        *,
        document_starts: bool = False,
        exhausted: Exhausted = "repeat",
        cache_dir: Path | None = None,
        pin_memory: bool | None = None,
    ) -> None:
        """`document_starts`: tell documents apart. `exhausted`: whether a source that was read once
        is read again in another order, or the data end there. `cache_dir`: as `open_token_set`.
        `pin_memory`: page-locked tensors; None pins where CUDA is there.
        """
        if global_batch_size % (micro_batch_size * world_size) or not 0 <= rank < world_size:
            raise ValueError("the global batch is not a multiple of micro-batch × ranks")
        import torch

        self._pin = torch.cuda.is_available() if pin_memory is None else pin_memory
        self.sequence_length, self.global_batch_size = sequence_length, global_batch_size
        self.micro_batch_size, self.rank, self.world_size = micro_batch_size, rank, world_size
        self.document_starts = document_starts
        self.token_sets = [open_token_set(source.path, cache_dir) for source in sources]
        check_same_tokenizer(self.token_sets)
        for token_set in self.token_sets:
            check_sequence_length(token_set, sequence_length)
        self.order = GlobalOrder(
            [token_set.num_sequences(sequence_length) for token_set in self.token_sets],
            [source.weight for source in sources],
            seed,
        )
        for source, quota in zip(sources, self.order.mixture.quotas, strict=True):
            if quota == 0:
                raise UserError(
                    str(source.path),
                    "data.train.weight",
                    f"{source.weight:g} is less than one sequence in {PERIOD}; raise it or leave "
                    "the source out",
                )
        self.last_batches = self._whole_batches() if exhausted == "stop" else None
        """Global batches until the first source is exhausted; None where sources repeat."""
        self._is_remote = any(token_set.is_remote for token_set in self.token_sets)
        self.batches = 0
        """Global batches handed out, on all ranks the same number: applied and skipped ones."""
        self.wait_seconds = 0.0
        """Seconds that the trainer has waited for data, in all."""
        self._prefetch: Prefetch | None = None

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one global batch on this rank."""
        return self.global_batch_size // (self.micro_batch_size * self.world_size)

    @property
    def identity(self) -> dict[str, Any]:
        """What is read, JSON-able: the sets' contents, their quotas, N. Not where they lie."""
        return {
            "order": ORDER_VERSION,
            "sequence_length": self.sequence_length,
            "sources": [
                {"set": token_set.fingerprint, "tokens": token_set.tokens, "per_thousand": quota}
                for token_set, quota in zip(self.token_sets, self.order.mixture.quotas, strict=True)
            ],
        }

    @property
    def fingerprint(self) -> str:
        """SHA-256 of `identity`, in hex. A run continues only where it is the same."""
        import hashlib
        import json

        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    @property
    def source_tokens(self) -> dict[str, int]:
        """Target tokens taken from each source in `batches` global batches, over all ranks."""
        drawn = self.order.mixture.drawn(self.batches * self.global_batch_size)
        counts: dict[str, int] = {}
        for token_set, sequences in zip(self.token_sets, drawn, strict=True):
            name = token_set.name
            counts[name] = counts.get(name, 0) + sequences * self.sequence_length
        return counts

    @property
    def is_exhausted(self) -> bool:
        """Whether the data end here: no further whole batch without reading a source again."""
        return self.last_batches is not None and self.batches >= self.last_batches

    @property
    def exhausted_source(self) -> str:
        """The source that runs out first, by name."""
        first = min(range(len(self.token_sets)), key=self._end_of)
        return self.token_sets[first].name

    def differences(self, before: Mapping[str, Any]) -> list[str]:
        """What is read now and was not read then, one line each. `before`: an `identity`."""
        now = self.identity
        found = [
            f"{key} {before.get(key)} -> {now[key]}"
            for key in ("order", "sequence_length")
            if before.get(key) != now[key]
        ]
        old, new = before.get("sources", []), now["sources"]
        for place, token_set in enumerate(self.token_sets):
            what = f"data.train.{place} ({token_set.name})"
            if place >= len(old):
                found.append(f"{what} was not there")
                continue
            changes = [
                f"{key} {old[place].get(key)} -> {new[place][key]}"
                for key in ("tokens", "per_thousand")
                if old[place].get(key) != new[place][key]
            ]
            if old[place].get("set") != new[place]["set"]:
                changes.append(
                    f"contents {str(old[place].get('set'))[:12]} -> {new[place]['set'][:12]}"
                )
            if changes:
                found.append(f"{what}: {', '.join(changes)}")
        found += [f"data.train.{place} was removed" for place in range(len(new), len(old))]
        return found

    def seek(self, batches: int) -> None:
        """Go on with global batch `batches`. Reads nothing."""
        if batches < 0:
            raise ValueError("batches must not be negative")
        self._stop_prefetch()
        self.batches = batches

    def next_step(self) -> Iterator[MicroBatch]:
        """The next global batch: its micro-batches of this rank.

        `batches` advances at once. What the caller leaves of an iterator is dropped when the next
        one starts.
        Raises: ValueError past the end (`is_exhausted`); while iterated: UserError where a shard
        cannot be read, or holds an id that the tokenizer has not.
        """
        if self.is_exhausted:
            raise ValueError("the data are exhausted")
        batch = self.batches
        self.batches += 1
        return self._micro_batches_of(batch)

    def batch_rows(self, batch: int) -> npt.NDArray[np.int64]:
        """Rows that this rank takes of a global batch, in that order: int64, by micro-batch."""
        steps = np.arange(self.micro_batches)[:, None] * self.world_size + self.rank
        rows = steps * self.micro_batch_size + np.arange(self.micro_batch_size)
        return batch * self.global_batch_size + rows

    def read(self, batch: int) -> Iterator[_Arrays]:
        """Global batch `batch`, unprefetched: this rank's arrays as in `MicroBatch`."""
        positions = self.batch_rows(batch)
        sources, sequences = self.order.locate(positions.reshape(-1))
        vocab_size = self.token_sets[0].vocab_size  # one tokenizer made all
        for step in range(len(positions)):
            rows = np.empty((self.micro_batch_size, self.sequence_length + 1), dtype=np.int64)
            starts = np.empty_like(rows[:, 1:], order="C") if self.document_starts else None
            part = slice(step * self.micro_batch_size, (step + 1) * self.micro_batch_size)
            drawn = {
                source: np.flatnonzero(sources[part] == source)
                for source in np.unique(sources[part]).tolist()
            }
            for source, of_source in drawn.items():
                self.token_sets[source].read_into(
                    [rows[row] for row in of_source.tolist()],
                    sequences[part][of_source],
                    None if starts is None else [starts[row] for row in of_source.tolist()],
                )
            # One look over all rows: one a row would cost as much as the copy of a short one.
            if int(rows.max()) >= vocab_size:
                for source, of_source in drawn.items():
                    self.token_sets[source].check_rows(rows[of_source], sequences[part][of_source])
            yield rows, starts

    def fetch_ahead(self, batch: int) -> None:
        """Begin to fetch what this rank needs of a global batch, where sets are remote."""
        if not self._is_remote:
            return
        sources, sequences = self.order.locate(self.batch_rows(batch).reshape(-1))
        for source in np.unique(sources).tolist():
            self.token_sets[source].fetch_ahead(sequences[sources == source], self.sequence_length)

    def close(self) -> None:
        """End the background thread. The loader may be used again afterwards."""
        self._stop_prefetch()
        for token_set in self.token_sets:
            token_set.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _end_of(self, source: int) -> int:
        """Place in the global order at which a source would repeat."""
        return self.order.mixture.position_of(source, self.order.sizes[source])

    def _whole_batches(self) -> int:
        ends = map(self._end_of, range(len(self.token_sets)))
        return min(ends) // self.global_batch_size

    def _micro_batches_of(self, batch: int) -> Iterator[MicroBatch]:
        if self._prefetch is None or not self._prefetch.will_give(batch):
            self._stop_prefetch()
            self._prefetch = Prefetch(
                batch,
                self.last_batches,
                lambda wanted: map(self._as_tensors, self.read(wanted)),
                self.fetch_ahead,
                micro_batch_tokens=self.micro_batch_size * (self.sequence_length + 1),
                batch_sequences=self.micro_batches * self.micro_batch_size,
            )
        prefetch = self._prefetch
        for step in range(self.micro_batches):
            started = time.perf_counter()
            tensor = prefetch.take(batch, step)
            self.wait_seconds += time.perf_counter() - started
            yield tensor

    def _stop_prefetch(self) -> None:
        if self._prefetch is not None:
            self._prefetch.stop()
            self._prefetch = None

    def _as_tensors(self, rows: _Arrays) -> MicroBatch:
        import torch

        tokens, starts = (None if part is None else torch.from_numpy(part) for part in rows)
        assert tokens is not None
        if self._pin:
            tokens, starts = tokens.pin_memory(), None if starts is None else starts.pin_memory()
        return MicroBatch(tokens, starts)


def validation_batches(
    token_set: TokenSet,
    sequence_length: int,
    sequences: int,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    *,
    document_starts: bool = False,
) -> Iterator[MicroBatch]:
    """Share of one rank in the set's first `sequences` sequences, in the set's own order.

    Yields up to a micro-batch of sequences at a time. All ranks together hold each sequence once,
    at any world size; where the number does not divide, some ranks get fewer rows or batches, so
    means are to be taken from sums and counts over all ranks.
    Raises: UserError where the set holds no sequence of that length, or a shard is damaged.
    """
    import torch

    check_sequence_length(token_set, sequence_length)
    total = min(sequences, token_set.num_sequences(sequence_length))
    for start in range(rank * micro_batch_size, total, world_size * micro_batch_size):
        size = min(micro_batch_size, total - start)
        indices = np.arange(start, start + size, dtype=np.int64)
        rows = np.empty((size, sequence_length + 1), dtype=np.int64)
        starts = np.empty((size, sequence_length), dtype=np.int64) if document_starts else None
        token_set.read_into(rows, indices, starts)
        token_set.check_rows(rows, indices)
        yield MicroBatch(
            torch.from_numpy(rows), None if starts is None else torch.from_numpy(starts)
        )
