"""Progress of long work: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import NoReturn

from tqdm import tqdm

from sgt_ds.terminal import assumed_size

LINE_EVERY_SECONDS = 10.0
# From so many bytes on they are reported in units of so many, by this name.
_BYTE_UNITS = ((1e11, 1e9, "GB"), (1e7, 1e6, "MB"), (1e4, 1e3, "kB"))


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `3 batches`: for nouns whose plural takes an s, or es after ch."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def duration(seconds: float) -> str:
    """A duration for a person: `42s`, `3m07s`, `2h05m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class Progress:
    """Shows how much of `total` units is done, how fast, and when it ends, on stderr.

    On a terminal a bar; elsewhere one complete line every ten seconds and one at the end. The unit
    `B` is told as kB, MB or GB where there are many.
    """

    def __init__(self, label: str, total: float | None, unit: str) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = 0.0
        self._started = self._last_line = time.monotonic()
        self._bar = self._new_bar() if sys.stderr.isatty() else None

    def advance(self, amount: float = 1, note: str = "") -> None:
        """Count `amount` more units as done; `note` stands behind the figures."""
        self.done += amount
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(amount)
        elif self.total and self.done >= self.total:
            return  # the last line, from `close`, says so
        elif time.monotonic() - self._last_line >= LINE_EVERY_SECONDS:
            self._print_line(note)

    def close(self, note: str = "") -> None:
        """End the bar, or print the last line."""
        if self._bar is not None:
            self._bar.close()
        else:
            self._print_line(note or "done")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif self._bar is not None:  # the error's own line follows, and is the only one
            self._bar.close()

    def _new_bar(self) -> tqdm[NoReturn]:
        columns, lines = assumed_size()
        return tqdm(
            desc=self.label,
            total=self.total,
            unit=self.unit,
            unit_scale=True,
            leave=True,
            ncols=columns,
            nrows=lines,
        )

    def _print_line(self, note: str) -> None:
        self._last_line = now = time.monotonic()
        elapsed = max(now - self._started, 1e-9)
        rate = self.done / elapsed
        size, unit = self._unit()
        parts = [f"{self.label}: {self.done / size:,.0f}"]
        if self.total:
            parts[0] += f"/{self.total / size:,.0f}"
        parts[0] += f" {unit}"
        parts.append(f"{rate / size:,.1f} {unit}/s")
        if self.total and rate > 0 and self.done < self.total:
            parts.append(f"ETA {duration((self.total - self.done) / rate)}")
        if note:
            parts.append(note)
        print("  ".join(parts), file=sys.stderr, flush=True)

    def _unit(self) -> tuple[float, str]:
        """How many of our units the one that is reported has, and its name."""
        if self.unit == "B":
            for least, size, name in _BYTE_UNITS:
                if max(self.total or 0, self.done) >= least:
                    return size, name
        return 1, self.unit
