"""Base class of all errors that this package raises on purpose. Imports no package."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = "command line"
"""Where a fault lies that is in no file."""

# What mends a refusal of the operating system, whatever the file was for.
ALLOW_ACCESS, _FREE = "allow access to it and to its folder", "free disk space"
_MENDS = {
    errno.EACCES: ALLOW_ACCESS,
    errno.EPERM: ALLOW_ACCESS,
    errno.EROFS: "mount its file system for writing",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ELOOP: "name what the link stands for",
    errno.ENOSPC: _FREE,
    errno.EDQUOT: _FREE,
    errno.EIO: "check the disk",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
    errno.ENFILE: "raise the system's limit on open files",
}
# Told in one line where they are met without a path, too: writing to an open file names none.
_FULL = {errno.ENOSPC, errno.EDQUOT}
# A matter of the path that the user gave; other refusals are the machine's.
_OF_PATHS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOENT),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EINVAL, errno.ENXIO),
    *(errno.ENODEV, errno.EXDEV, errno.EBUSY, errno.ETXTBSY),
}


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


def refusal(error: Exception, deed: str, mend: str = "", *, instead: str = "") -> str:
    """Why something `cannot be` read, written or the like, and what mends just that.

    `mend`: told where the system's reason asks for none of its own. `instead`: what may be done
    rather than that, as `choose another run_dir`.
    """
    number = error.errno if isinstance(error, OSError) else None
    reason = getattr(error, "strerror", None) or str(error)
    mends = [_MENDS.get(number or 0, mend), instead]
    told = ", or ".join(each for each in mends if each) or "check the path"
    return f"cannot be {deed} ({reason}); {told}"


def refused_by_system(
    error: BaseException, field_of: Callable[[Path], str | None] = lambda _: None
) -> SgtError | None:
    """What the operating system refused at a path, as an error of ours; None of any other error.

    `field_of`: the flag or key that gives a path.
    """
    cause = error.__context__ if isinstance(error, RuntimeError) else None
    if isinstance(cause, OSError) and cause.errno == errno.ELOOP:
        error = cause  # as Path.resolve tells a loop of links, before Python 3.13
    if not isinstance(error, OSError) or error.errno is None:
        return None
    if isinstance(error.filename, str | bytes):
        path = Path(os.fsdecode(error.filename))
        told = UserError(path, field_of(path), refusal(error, "used"))
        return told if error.errno in _OF_PATHS else SgtError(str(told))
    if error.errno in _FULL:
        return SgtError(f"the disk {refusal(error, 'written')}")
    return None


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
