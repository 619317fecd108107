"""How fast this process trains, for the log and its ETA. Knows no phase of an update."""

from __future__ import annotations

import time


class Throughput:
    """Tokens per second from one report to the next; seconds per update since training began.

    `tokens`, `step`: how far the run has come, what earlier processes did included.
    """

    def __init__(self) -> None:
        self._began, self._first_step = 0.0, 0
        self._reported, self._tokens = 0.0, 0

    def begin(self, step: int, tokens: int) -> None:
        """Training begins in this process."""
        self._began, self._first_step = time.perf_counter(), step
        self.skip(tokens)

    def skip(self, tokens: int) -> None:
        """Leave the time until now out of the throughput: there was more in it than training."""
        self._reported, self._tokens = time.perf_counter(), tokens

    def tokens_per_second(self, tokens: int) -> float:
        """Since the report before, or what was left out; this is the next one."""
        then, tokens_then = self._reported, self._tokens
        self.skip(tokens)
        return (tokens - tokens_then) / (self._reported - then)

    def step_seconds(self, step: int) -> float:
        """Mean over all updates of this process; whatever came between them is in it."""
        return (time.perf_counter() - self._began) / (step - self._first_step)
