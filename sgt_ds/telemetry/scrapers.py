"""Who scrapes an exporter, and whether all of them have read how the run ended. Knows no HTTP."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

# Longer than any sensible scrape interval.
GONE_AFTER_SECONDS = 120.0
# How late a turn may be where they follow each other quickly.
LATE_BY_SECONDS = 5.0
# Of its latest reads, the longest pause tells its interval: Prometheus itself may restart.
_PAUSES = 4


@dataclass(slots=True)
class _Scraper:
    """One scraper: when it last read, the pauses before that, and whether it has read the end."""

    last: float
    pauses: list[float] = field(default_factory=list)
    knows_the_end: bool = False

    @property
    def gone_after(self) -> float:
        """When it counts as gone if it has not read again: it missed two of its turns."""
        pause = max(self.pauses, default=GONE_AFTER_SECONDS)
        return self.last + min(GONE_AFTER_SECONDS, max(LATE_BY_SECONDS, 2 * pause))


class Scrapers:
    """All scrapers of one exporter. Its threads report what they served; `wait` waits for the end."""

    def __init__(self) -> None:
        self._scrapers: dict[str, _Scraper] = {}
        self._changed = threading.Condition()

    def served(self, name: str, *, the_end: bool) -> None:
        """A scraper was served, and was told whether the run has ended."""
        now = time.monotonic()
        with self._changed:
            scraper = self._scrapers.get(name)
            if scraper is None or now > scraper.last + GONE_AFTER_SECONDS:
                scraper = self._scrapers[name] = _Scraper(now)
            else:
                scraper.pauses = [*scraper.pauses, now - scraper.last][-_PAUSES:]
                scraper.last = now
            scraper.knows_the_end |= the_end
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait, at most so long, until each scraper that is not gone has read the end."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while (left := min(deadline, self._awaited_until()) - time.monotonic()) > 0:
                self._changed.wait(left)

    def _awaited_until(self) -> float:
        """When the last of those who have not read the end counts as gone."""
        waiting = (one.gone_after for one in self._scrapers.values() if not one.knows_the_end)
        return max(waiting, default=float("-inf"))
