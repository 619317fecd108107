"""Operator requests to a live run: a file in its directory, which the run looks for."""

from __future__ import annotations

from pathlib import Path

from sgt_ds.config import RunLayout
from sgt_ds.errors import UserError, refusal
from sgt_ds.files import write_text_atomically
from sgt_ds.growth.lines import journal_in


def request_freeze(run: Path) -> Path:
    """Ask a run to freeze its growth from the next decision on. Returns the file that says so.

    Raises: UserError where `run` is not a run directory.
    """
    if not run.is_dir():
        raise UserError(run, None, "is not a run directory; give the run_dir of a run")
    journal_in(run)
    request = RunLayout(run).freeze_request
    try:
        request.parent.mkdir(exist_ok=True)
        write_text_atomically(request, "freeze growth\n")
    except OSError as error:
        raise UserError(request, None, refusal(error, "written")) from None
    return request
