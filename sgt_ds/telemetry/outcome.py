"""How the newest `sgt-ds train` of a run ended: RUN/control/outcome.json."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from sgt_ds.files import write_text_atomically


@dataclass(frozen=True, slots=True)
class Outcome:
    """`status`: its exit status. `reason`: in words. `ended`: when, in seconds since the epoch."""

    status: int
    reason: str
    ended: float


def write_outcome(control: Path, status: int, reason: str) -> None:
    """Write it to the run's folder of that name. Raises: OSError."""
    text = json.dumps(asdict(Outcome(status, reason, time.time())))
    write_text_atomically(control / "outcome.json", text + "\n")


def read_outcome(control: Path) -> Outcome | None:
    """What is written there; None where nothing is, or something else."""
    try:
        values = json.loads((control / "outcome.json").read_text("utf-8"))
        return Outcome(int(values["status"]), str(values["reason"]), float(values["ended"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
