"""What ends a run before its last step: a request to stop, or updates that keep being skipped."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

from sgt_ds.errors import Diverged


class StopRequest:
    """Whether this rank has been asked to stop: by SIGTERM or SIGINT, or by a file in the run.

    Only remembers; the ranks agree by a collective between two steps, save and end together.
    """

    def __init__(self, request: Path) -> None:
        self._file = request
        self._signalled = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def is_set(self) -> bool:
        """Whether a signal came or the stop file is there."""
        return self._signalled or self._file.exists()

    def clear(self) -> None:
        """Take the stop file away: a new start must not end at once."""
        self._file.unlink(missing_ok=True)


class SkippedSteps:
    """Counts updates that were skipped for non-finite gradients, and stops a run that diverged."""

    def __init__(self, limit: int) -> None:
        self.total, self.in_a_row, self._limit = 0, 0, limit

    def applied(self) -> None:
        """An update was applied: the row ends."""
        self.in_a_row = 0

    def skipped(self, step: int, last_checkpoint: str) -> None:
        """An update was skipped. Raises: Diverged after too many in a row."""
        self.total += 1
        self.in_a_row += 1
        if self.in_a_row >= self._limit:
            raise Diverged(
                f"step {step}: {self.in_a_row} updates in a row had non-finite gradients on at "
                f"least one rank; last good checkpoint: {last_checkpoint}"
            )
