"""Base class of all errors that this package raises on purpose. Imports no package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = "command line"
"""Where a fault lies that is in no file."""


class SgtError(Exception):
    """Root of the package's errors. `exit_code` is what a command ends with when it meets one.

    `everywhere`: every rank of a run raises the same error, so that one of them tells it.
    """

    exit_code = 1
    everywhere = False


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


class UserError(SgtError):
    """A mistake in what the user gave: rendered as a line `file: field: fault and remedy`, exit 2.

    `file`: the file (or flag, or host) at fault. `field`: the key, line or flag inside it, or None.
    `message`: what is wrong and what to do, in one line.
    """

    exit_code = 2

    def __init__(
        self, file: str | Path, field: str | None, message: str, *, everywhere: bool = False
    ) -> None:
        self.everywhere = everywhere
        # A path may hold line breaks, or what a terminal obeys.
        self.file, self.field = _printable(str(file)), None if field is None else _printable(field)
        self.message = _printable(" ".join(message.split()))
        super().__init__(": ".join(part for part in (self.file, self.field, self.message) if part))

    def __reduce__(self) -> tuple[Any, ...]:
        # As raised in another process: an exception pickles as its message alone.
        return type(self), (self.file, self.field, self.message), {"everywhere": self.everywhere}

    def on_all_ranks(self) -> UserError:
        """The same mistake, for every rank to raise."""
        return UserError(self.file, self.field, self.message, everywhere=True)


@contextmanager
def in_field(field: str) -> Iterator[None]:
    """A fault inside the block that names no field is of what `field`, a key or flag, gives."""
    try:
        yield
    except UserError as error:
        if error.field is not None:
            raise
        raise UserError(error.file, field, error.message, everywhere=error.everywhere) from None


class Diverged(SgtError):
    """Training stopped because loss or gradients stayed non-finite."""

    everywhere = True


class StateMismatch(SgtError):
    """Ranks hold different architectural states, or weights; the message names the ranks."""

    everywhere = True


class LostPeer(SgtError):
    """A rank that this one talks to has gone."""


class NotMet(SgtError):
    """Ranks did not meet at the start, or one went meanwhile: who is to blame can't be told."""
