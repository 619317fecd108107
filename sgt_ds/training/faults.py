"""What stops a run before its last step: a request to stop, or updates that keep being skipped."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from types import FrameType

from sgt_ds.config import RunLayout
from sgt_ds.errors import Diverged
from sgt_ds.files import seems_there
from sgt_ds.training.heartbeat import Heartbeat

log = logging.getLogger(__name__)


class Requests:
    """What this rank has been asked: to stop, by SIGTERM, SIGINT, a file or the end of what started
    it; to freeze, by a file.

    Only remembers; the ranks agree by a collective between two steps and act together. A folder
    that does not answer asks for nothing.
    """

    def __init__(self, layout: RunLayout, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._stop_file, self._freeze_file = layout.stop_request, layout.freeze_request
        self._signalled = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def stop(self) -> bool:
        """Whether a signal came, the stop file is there, or no one minds this rank any more."""
        return self._signalled or self._heartbeat.launcher_lost or seems_there(self._stop_file)

    def asked_by_file(self) -> bool:
        """Whether the stop file is there: `sgt-ds stop`, or a supervisor that was asked to stop.

        Otherwise a supervisor takes the end for a fault, and may restart the run.
        """
        return seems_there(self._stop_file)

    def freeze(self) -> bool:
        """Whether growth is to decide nothing any more. The file stays: a resume obeys it too."""
        return seems_there(self._freeze_file)

    def stopped(self) -> None:
        """Take the stop file away when it has been obeyed: a new start must not end at once."""
        try:
            self._stop_file.unlink(missing_ok=True)
        except OSError as error:
            log.warning(
                "%s: cannot be removed (%s); remove it before the next start",
                self._stop_file,
                error.strerror,
            )


class SkippedSteps:
    """Counts updates that were skipped for non-finite gradients, and stops a run that diverged."""

    def __init__(self, limit: int) -> None:
        self.total, self.in_a_row, self._limit = 0, 0, limit

    def applied(self) -> None:
        """An update was applied: the row ends."""
        self.in_a_row = 0

    def skipped(self, step: int, last_checkpoint: Callable[[], str]) -> None:
        """An update was skipped. `last_checkpoint`: the newest good one, asked for at the end only.

        Raises: Diverged after too many in a row.
        """
        self.total += 1
        self.in_a_row += 1
        if self.in_a_row >= self._limit:
            raise Diverged(
                f"step {step}: {self.in_a_row} updates in a row had non-finite gradients on at "
                f"least one rank; last good checkpoint: {last_checkpoint()}; lower optimizer.lr "
                "(in another run_dir; `fork` continues from a checkpoint), or check the data of "
                "these updates"
            )
