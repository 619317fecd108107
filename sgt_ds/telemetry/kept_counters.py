"""Run counters as scrapers last saw them, in a file that survives a crash."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

from sgt_ds.files import write_text_atomically
from sgt_ds.telemetry.snapshot import Counters

log = logging.getLogger(__name__)


class KeptCounters:
    """The counters' file. Written by scrapes, one at a time: a disk may hang, scrapes may not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writing = threading.Lock()
        self._text = ""

    def keep(self, counters: Counters) -> None:
        """Write them where they have changed and no one writes. Raises: OSError."""
        if not self._writing.acquire(blocking=False):
            return
        try:
            text = json.dumps(counters)
            if text != self._text:
                write_text_atomically(self._path, text + "\n")
                self._text = text
        finally:
            self._writing.release()

    def read(self) -> Counters:
        """What was kept; nothing where no scrape ever came or the file is damaged."""
        try:
            values = json.loads(self._path.read_text(encoding="utf-8"))
            return {
                str(name): {str(label): float(value) for label, value in series.items()}
                for name, series in values.items()
            }
        except FileNotFoundError:
            return {}
        except (
            *(OSError, ValueError, AttributeError, TypeError),
            *(RecursionError, OverflowError),
        ) as error:
            log.warning(
                "telemetry: %s not readable, counters may reset at this restart: %s",
                self._path,
                error,
            )
            return {}
