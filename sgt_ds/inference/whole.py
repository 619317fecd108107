"""A folder written atomically, and the one line that says why it could not be."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sgt_ds.errors import UserError, refusal
from sgt_ds.files import fsync_directory


@contextmanager
def whole_or_absent(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its name if the block ends without an error."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        for path in temporary.iterdir():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
        fsync_directory(temporary)
        if out.is_dir():
            out.rmdir()
        temporary.rename(out)
        fsync_directory(out.parent)
    except OSError as error:
        message = refusal(error, "written", instead="choose another --out")
        raise UserError(out, None, message) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
