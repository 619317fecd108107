"""How a run ended: RUN/control/outcome.json, until its next start."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from sgt_ds.files import write_text_atomically

_NAME = "outcome.json"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`status`: exit status of `sgt-ds train`, 0 of a rollback. `reason`: in words.

    `written`: when, by the file system's clock. `data_end_step`: where the run is complete before its
    last step, because its data ended there; None otherwise.
    """

    status: int
    reason: str
    written: float
    data_end_step: int | None = None


def write_outcome(
    control: Path, status: int, reason: str, *, data_end_step: int | None = None
) -> None:
    """Write it to the run's folder of that name. Raises: OSError."""
    values = {"status": status, "reason": reason, "data_end_step": data_end_step}
    text = json.dumps({**values, "ended": time.time()})
    write_text_atomically(control / _NAME, text + "\n")


def read_outcome(control: Path) -> Outcome | None:
    """What is written there; None where nothing is, or something else."""
    path = control / _NAME
    try:
        values = json.loads(path.read_text("utf-8"))
        status, reason = int(values["status"]), str(values["reason"])
        step = values.get("data_end_step")  # older versions don't tell it
        return Outcome(status, reason, path.stat().st_mtime, None if step is None else int(step))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def stopped_as_requested(step: int, steps: int) -> str:
    """The reason of a run that was asked to stop, saved at `step`."""
    saved = f"saved at step {step} of {steps}" if step else "no update was saved"
    return f"stopped as requested; {saved}"


def remove_outcome(control: Path) -> None:
    """The run continues. Raises: OSError."""
    (control / _NAME).unlink(missing_ok=True)
