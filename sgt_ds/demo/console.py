"""What the demo prints: numbered steps, commands, lines that are replaced on a terminal.

Knows no step. On a terminal the newest progress line is rewritten in place; elsewhere a line of
progress appears now and then, and all others at once.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

STEPS = 6
PROGRESS_EVERY_SECONDS = 15.0


class Console:
    """Prints to stdout, line by line."""

    def __init__(self) -> None:
        self._live = sys.stdout.isatty()
        self._unfinished = False  # whether the cursor stands behind a progress line
        self._last_progress = 0.0

    def step(self, number: int, title: str) -> None:
        """Begin step `number`."""
        self.line("")
        self.line(f"[{number}/{STEPS}] {title}")

    def command(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Show a command as a user would type it."""
        words = [f"{key}={shlex.quote(value)}" for key, value in environment.items()]
        words += [shlex.quote(_as_typed(word)) for word in argv]
        self.line("  $ " + " ".join(words))

    def note(self, text: str) -> None:
        """A fact about the step under way."""
        self.line(f"  {text}")

    def table(self, *rows: tuple[str, object]) -> None:
        """Names and what they stand for, in two columns."""
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.line(f"  {name:<{width}}  {value}")
        self.line("")

    def line(self, text: str) -> None:
        """A line that stays."""
        if self._unfinished:
            print("\r\x1b[K", end="")
            self._unfinished = False
        print(text, flush=True)

    def progress(self, text: str) -> None:
        """A line that the next one replaces."""
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K  {text}"[: width + 4], end="", flush=True)
            self._unfinished = True
        elif time.monotonic() - self._last_progress >= PROGRESS_EVERY_SECONDS:
            self._last_progress = time.monotonic()
            self.line(f"  {text}")


def _as_typed(word: str) -> str:
    """The word without the virtual environment's path in front of a program's name."""
    path = Path(word)
    return path.name if path.parent == Path(sys.executable).parent else word
