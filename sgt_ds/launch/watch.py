"""What the supervisor sees of the ranks: their heartbeats. Ends nothing itself."""

from __future__ import annotations

import shutil
import time
from collections.abc import Container
from pathlib import Path

from sgt_ds.config import RunLayout
from sgt_ds.telemetry import heartbeats

LOOK_SECONDS = 2.0

_NODE_MARK = ".node"


def launch_name(run_id: str) -> str:
    """The name under which all ranks of a launch, on whatever host, leave their heartbeats."""
    return run_id.partition(_NODE_MARK)[0]


def node_run_id(launch: str, node_rank: int) -> str:
    """The id of one host's processes, in a launch whose hosts are started one by one."""
    return f"{launch}{_NODE_MARK}{node_rank}"


class Watch:
    """Looks after the ranks of one launch, and lets them see that someone does."""

    def __init__(self, run_dir: Path, run_id: str) -> None:
        self._folder = RunLayout(run_dir).signs_of_life(launch_name(run_id))
        self._looked = self._began = 0.0
        self._heard: dict[int, tuple[float, float]] = {}  # by rank: its file's time, silence since

    @property
    def folder(self) -> Path:
        """Where the launch's ranks, and what starts them, leave their signs."""
        return self._folder

    def begin(self, node_rank: int | None = None) -> None:
        """A launch begins. `node_rank`: this host's place where each has a launch of its own.

        The first one takes away what earlier launches left. Ranks watch the process of a launch
        that is the only one.
        """
        if not node_rank:
            for old in self._folder.parent.glob("*"):
                if old != self._folder:
                    shutil.rmtree(old, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        # What is older is of an earlier launch under the same name.
        alone = node_rank is None
        write = heartbeats.write_supervisor if alone else heartbeats.renew_supervisor
        self._began = write(self._folder)

    def hang(self) -> str:
        """Why everything must be ended, in one line; '' while ranks go on. Looks now and then."""
        since = time.monotonic() - self._looked
        if since < LOOK_SECONDS:
            return ""
        self._looked += since
        try:
            heartbeats.renew_supervisor(self._folder)
            told = self._folder / heartbeats.HANG_FILE
            if told.exists() and told.stat().st_mtime >= self._began:
                return told.read_text(encoding="utf-8").strip() or "nothing is making progress"
            beats = self._with_silence(since)
            quiet = heartbeats.silent(beats)
            if quiet:
                # The ranks can't tell: the only one, or all of them, are stopped.
                line = heartbeats.hang(beats, min(silence for _, silence in quiet))
                told.write_text(line + "\n", encoding="utf-8")
                return line
        except OSError:  # the shared directory does not answer: that alone ends nothing
            pass
        return ""

    def deaths(self, status_signal: int = 0, *, among: Container[int] | None = None) -> str:
        """Which ranks fell first in a launch that is over; '' if none is known to have.

        `status_signal`: as in `heartbeats.deaths`. `among`: look at these ranks only.
        """
        try:
            found = heartbeats.read_kills(self._folder)
            kills = [kill for kill, written in found if written >= self._began]
            beats = self._beats()
        except OSError:
            return ""
        if among is not None:
            kills = [kill for kill in kills if kill.rank in among]
            beats = [(beat, written) for beat, written in beats if beat.rank in among]
        return heartbeats.deaths(beats, kills, status_signal)

    def _with_silence(self, since: float) -> list[tuple[heartbeats.Beat, float]]:
        """The beats, each with the seconds for which this process has seen none newer.

        `since`: the last look. No look is worth more than two: while the shared directory or this
        process stood still, ranks that live could not be heard.
        """
        beats = self._beats()
        before, self._heard = self._heard, {}
        for beat, written in beats:
            last, silence = before.get(beat.rank, (0.0, 0.0))
            silence = silence + min(since, 2 * LOOK_SECONDS) if written == last else 0.0
            self._heard[beat.rank] = written, silence
        return [(beat, self._heard[beat.rank][1]) for beat, _ in beats]

    def _beats(self) -> list[tuple[heartbeats.Beat, float]]:
        beats = heartbeats.read_beats(self._folder)
        return [(beat, written) for beat, written in beats if written >= self._began]
