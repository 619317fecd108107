"""What stdout and stderr lead to: text that their encoding lacks, a terminal that has no size."""

from __future__ import annotations

import codecs
import io
import os
import sys

_OR_REPLACED = "sgt-ds-or-replaced"


def take_any_text() -> None:
    """Make stdout and stderr write `?` for what their encoding lacks, as `×` in LC_ALL=C.

    Bytes of a path that are no text are given back as they are.
    """
    codecs.register_error(_OR_REPLACED, _or_replaced)
    for stream in (sys.stdout, sys.stderr):
        # stderr, by Python, escapes; a stream of someone else's is left alone.
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors=_OR_REPLACED)


def _or_replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    code = ord(error.object[error.start])
    # As `surrogateescape` keeps a byte of a path.
    kept = bytes([code - 0xDC00]) if 0xDC80 <= code <= 0xDCFF else "?"
    return kept, error.start + 1


def assumed_size() -> tuple[int, int] | tuple[None, None]:
    """Columns and lines of a terminal behind stderr that tells none, as one whose size nobody set.

    None of one that does.
    """
    try:
        told = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):  # no terminal
        return None, None
    return (None, None) if all(told) else (told.columns or 80, told.lines or 24)
