"""Micro-batches read ahead of the trainer by a thread. Knows nothing of their contents."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import Full, Queue
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Tokens that wait for the trainer, at most (int64: 32 MiB), and micro-batches, at least two.
PREFETCH_TOKENS = 1 << 22
PREFETCH_MICRO_BATCHES = 64
# Sequences of this rank whose shards are fetched ahead, at least, where sets are remote.
FETCH_AHEAD_SEQUENCES = 256
_STOP_POLL_SECONDS = 0.1


class MicroBatch(NamedTuple):
    """What one forward pass takes."""

    tokens: Tensor
    """int64 (sequences, N + 1): inputs are the first N, targets the last N."""
    document_starts: Tensor | None
    """int64 (sequences, N): for each input the place at which its document starts in the sequence,
    0 up to the first boundary; None where documents are not told apart."""

    def to(self, device: torch.device) -> MicroBatch:
        """On the device, without waiting where the memory is pinned."""
        tokens, starts = self
        moved = tokens.to(device, non_blocking=True)
        return MicroBatch(moved, None if starts is None else starts.to(device, non_blocking=True))


_Item = tuple[int, int, "MicroBatch | BaseException"]


class Prefetch:
    """A thread that reads micro-batches ahead, from one global batch on, in order."""

    def __init__(
        self,
        batch: int,
        last_batch: int | None,
        read: Callable[[int], Iterator[MicroBatch]],
        fetch: Callable[[int], None],
        *,
        micro_batch_tokens: int,
        batch_sequences: int,
    ) -> None:
        """Begin at global batch `batch`, end before `last_batch` (None: never).

        `read`: a batch's micro-batches. `fetch`: begin to fetch a batch's shards from afar.
        `micro_batch_tokens`, `batch_sequences`: of this rank; they say how far ahead is enough.
        """
        self._first, self._last, self._read, self._fetch = batch, last_batch, read, fetch
        self._fetch_ahead = 1 + -(-FETCH_AHEAD_SEQUENCES // batch_sequences)
        ahead = max(2, min(PREFETCH_MICRO_BATCHES, PREFETCH_TOKENS // micro_batch_tokens))
        self._queue: Queue[_Item] = Queue(maxsize=ahead)
        self._last_taken = (batch, -1)
        self._failed = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="data-prefetch", daemon=True)
        self._thread.start()

    def will_give(self, batch: int) -> bool:
        """Whether the whole of `batch` is still to come, and soon."""
        taken, step = self._last_taken
        if self._failed:
            return False
        return batch == taken + 1 or (batch == taken and step == -1)

    def take(self, batch: int, step: int) -> MicroBatch:
        """Wait for one micro-batch; earlier ones that no one took are dropped.

        Raises: what reading raised, in the caller's thread.
        """
        while True:
            if (batch, step) <= self._last_taken:
                raise RuntimeError("a later global batch was begun; this one is gone")
            found_batch, found_step, content = self._queue.get()
            if isinstance(content, BaseException):
                self._failed = True
                raise content
            self._last_taken = (found_batch, found_step)
            if (found_batch, found_step) == (batch, step):
                return content

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopped.set()
        self._thread.join()

    def _fill(self) -> None:
        batch, step = self._first, 0
        fetching = batch
        try:
            while batch != self._last:
                while fetching < batch + self._fetch_ahead:
                    self._fetch(fetching)
                    fetching += 1
                for step, content in enumerate(self._read(batch)):
                    if not self._put((batch, step, content)):
                        return
                batch, step = batch + 1, 0
        except BaseException as error:  # whatever it was, the trainer must hear of it
            self._put((batch, step, error))

    def _put(self, item: _Item) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=_STOP_POLL_SECONDS)
                return True
            except Full:
                continue
        return False
