"""What the supervisor sees of the ranks: their signs of life. Ends nothing itself."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from sgt_ds.config import RunLayout
from sgt_ds.telemetry import heartbeats

LOOK_SECONDS = 2.0

_NODE_MARK = ".node"


def launch_name(run_id: str) -> str:
    """The name under which all ranks of a launch, on whatever host, leave their signs of life."""
    return run_id.partition(_NODE_MARK)[0]


def node_run_id(launch: str, node_rank: int) -> str:
    """The id of one host's processes, in a launch whose hosts are started one by one."""
    return f"{launch}{_NODE_MARK}{node_rank}"


class Watch:
    """Looks after the ranks of one launch, and lets them see that somebody does."""

    def __init__(self, run_dir: Path, run_id: str) -> None:
        self._folder = RunLayout(run_dir).signs_of_life(launch_name(run_id))
        self._looked = self._began = 0.0

    def begin(self, *, first_host: bool) -> None:
        """A launch begins. `first_host`: what earlier launches left is no longer needed."""
        if first_host:
            for old in self._folder.parent.glob("*"):
                if old != self._folder:
                    shutil.rmtree(old, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        # What is older is of an earlier launch under the same name.
        self._began = heartbeats.write_supervisor(self._folder)

    def hang(self) -> str:
        """Why everything must be ended, in one line; '' while ranks go on. Looks now and then."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return ""
        self._looked = time.monotonic()
        try:
            now = heartbeats.write_supervisor(self._folder)
            told = self._folder / heartbeats.HANG_FILE
            if told.exists() and told.stat().st_mtime >= self._began:
                return told.read_text(encoding="utf-8").strip() or "nothing moves any more"
            beats = self._beats()
            quiet = heartbeats.silent(beats, now)
            if quiet:
                # The ranks can't tell: the only one, or all of them, are stopped.
                line = heartbeats.hang(beats, now, min(age for _, age in quiet))
                told.write_text(line + "\n", encoding="utf-8")
                return line
        except OSError:  # the shared directory does not answer: that alone ends nothing
            pass
        return ""

    def deaths(self) -> str:
        """Which ranks fell first in a launch that is over; '' if none is known to have."""
        try:
            return heartbeats.deaths(self._beats())
        except OSError:
            return ""

    def _beats(self) -> list[tuple[heartbeats.Beat, float]]:
        beats = heartbeats.read_beats(self._folder)
        return [(beat, written) for beat, written in beats if written >= self._began]
