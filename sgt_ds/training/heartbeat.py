"""Signs of life of this rank, and its end where nothing moves any more.

A thread beside training: it needs no answer from training, which may wait in a collective for ever.
Knows not how long a part may take (`part_limits`), nor who started this rank (`launcher_watch`).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from sgt_ds.errors import LostPeer, NotMet, UserError, refusal
from sgt_ds.telemetry import heartbeats
from sgt_ds.training.launcher_watch import LauncherWatch
from sgt_ds.training.part_limits import PartLimits
from sgt_ds.training.sigterm import Sigterm

# Heartbeats that all ranks together give to the file system that they share: each one a second,
# less often where they are many.
RANKS_A_SECOND = 64

Item = TypeVar("Item")


class Heartbeat:
    """Writes where this rank stands; ends the process where one part takes longer than it may.

    `hang_seconds`, `patient_seconds`: as `PartLimits` takes them. `launched`: whether a launcher
    must stand above.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        world_size: int = 1,
        hang_seconds: float,
        patient_seconds: float,
        launched: bool = False,
    ) -> None:
        self.folder = folder
        self.saves: Callable[[], bool] = lambda: False
        """Whether a save is under way: its writes may hold up heartbeats on the disk they share."""
        self.progressed_at = time.time()
        """When this rank last began a part or moved on in one, by its own clock in Unix seconds."""
        self._rank, self._host, self._alone = rank, socket.gethostname(), world_size == 1
        self._next_rank = (rank + 1) % world_size
        self._limits = PartLimits(hang_seconds, patient_seconds)
        self._launcher_watch = LauncherWatch(folder, launched=launched)
        self._every = min(
            hang_seconds / 3, max(min(1.0, hang_seconds / 6), world_size / RANKS_A_SECOND)
        )
        self._step = self._count = self._moved = 0
        self._end, self._blames_peer = "", False
        self._watched = (0, 0)  # what `_stuck_seconds` counts: the part, and how far it is
        self._stuck_seconds = self._waits_until = 0.0
        self._born = 0.0  # by the file system's clock
        self._asked = False
        self._over, self._signed_off = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._born = self._write()
        except OSError as error:
            message = refusal(error, "written", instead="choose another run_dir")
            raise UserError(self.folder, None, message) from None
        self._sigterm = Sigterm()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # First: a beat in between must not blame this rank for its peer.
        self._blames_peer = isinstance(error, (LostPeer, NotMet))
        if error is None:
            gone = self._launcher_watch.launcher_ended
            self._end = heartbeats.LAUNCHER_GONE if gone else heartbeats.DONE
        else:
            self._end = " ".join(f"{error}".split())[:300] or repr(error)
        self._over.set()
        self._sigterm.wake()
        # The thread has the last word, since a disk may never answer: no one waits for it longer
        # than for any other heartbeat.
        self._thread.join(timeout=self._limits.hang_seconds)
        self._sigterm.release()
        if not (self._signed_off or self._thread.is_alive()):  # a fault of its own has ended it
            with suppress(OSError):
                self._write()

    @property
    def launcher_lost(self) -> bool:
        """Whether what started this rank has gone: it saves and ends then."""
        return self._launcher_watch.is_orphaned

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self._alone

    @property
    def is_starting(self) -> bool:
        """Whether this rank joins, builds or loads: another one may never have been there."""
        return self._limits.part == "start"

    @property
    def own_name(self) -> str:
        """The rank and its host, for a message."""
        return f"rank {self._rank} on {self._host}"

    @property
    def place(self) -> str:
        """The part in progress, for a message."""
        return f"{self._limits.part} of step {self._step}"

    def update(self, step: int, shape: Hashable) -> None:
        """An update begins. `shape`: what the compiled blocks depend on; a new one may compile."""
        self._step = step
        self._limits.update(shape)

    def enter(self, part: str) -> None:
        """A part begins: on every rank the same ones, in the same order.

        Each stage of a start (joining, model, engine, data, loading) enters "start" again.
        """
        self._limits.enter(part)
        self._count += 1
        self.progressed_at = time.time()

    def moved(self) -> None:
        """The part goes on, and its time begins anew. Ranks may say so differently often."""
        self._moved += 1
        self.progressed_at = time.time()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For the length of the block, wait for the other ranks, within a part that may last.

        Who is late for it still has the part's own time; where no one is, the wait is a hang.
        """
        part = self._limits.part
        self.enter("agreement")
        try:
            yield
        finally:
            self.enter(part)

    def each(self, part: str, items: Iterable[Item]) -> Iterator[Item]:
        """The items, each one's making a part of its own."""
        iterator = iter(items)
        while True:
            self.enter(part)
            try:
                item = next(iterator)
            except StopIteration:
                return
            yield item

    def _watch(self) -> None:
        then = time.monotonic()
        while True:
            if self._sigterm.wait(self._every):
                self._heed_sigterm()
            if self._over.is_set():
                with suppress(OSError):
                    self._write()
                    self._signed_off = True
                return
            now = time.monotonic()
            # While this process or its whole machine was stopped, no one else waited for it either.
            seconds, then = min(now - then, 2 * self._every), now
            self._count_stuck(seconds)
            self._launcher_watch.look_at_launchers()
            try:
                self._write()
                self._look_around(seconds)
            except OSError:  # the shared directory does not answer: that alone ends nothing
                continue

    def _heed_sigterm(self) -> None:
        """Say so at once: what sent it may kill soon, and this rank is not the one that fell."""
        self._asked = True
        with suppress(OSError):
            self._write()
        if self._sigterm.is_unhandled():
            os._exit(128 + signal.SIGTERM)

    def _count_stuck(self, seconds: float) -> None:
        now = (self._count, self._moved)
        if now != self._watched:
            self._watched, self._stuck_seconds, self._waits_until = now, 0.0, 0.0
            return
        self._stuck_seconds += seconds
        if self._stuck_seconds > max(self._limits.hang_seconds, self._waits_until):
            self._judge()

    def _look_around(self, seconds: float) -> None:
        told = heartbeats.written_at(self.folder / heartbeats.HANG_FILE)
        if told is not None and told >= self._born:
            os._exit(1)  # another rank, or the supervisor, has told it already
        self._launcher_watch.look_at_supervisor(seconds)

    def _write(self) -> float:
        """Write where this rank stands. Returns the time, by the file system's clock."""
        beat = heartbeats.Beat(
            rank=self._rank,
            host=self._host,
            pid=os.getpid(),
            step=self._step,
            part=self._limits.part,
            count=self._count,
            limit_seconds=self._limits.limit_seconds,
            silence_seconds=self._limits.silence_seconds(saves=self.saves()),
            asked=self._asked,
            seconds=self._stuck_seconds if self._watched[0] == self._count else 0.0,
            end=self._end,
            blames_peer=self._blames_peer,
        )
        return heartbeats.write_beat(self.folder, beat)

    def _judge(self) -> None:
        """Tell who is late, and end; wait on where a rank may still take its time, this one or
        another, and none is silent.
        """
        limits = self._limits
        over = self._stuck_seconds > limits.limit_seconds
        quiet_seconds = limits.limit_seconds / 2 if over else limits.hang_seconds
        # While this rank may wait, what an earlier launch left here is no silent rank.
        since = self._born - (limits.patient_seconds if over else 0.0)
        try:
            now = self._write()
            # Many may wait at a start: each looks at the one rank that comes next.
            ages = self._ages(now, since, None if over else self._next_rank)
            if over:
                left = heartbeats.awaited_seconds(ages, quiet_seconds)
            elif left := heartbeats.soonest_silence(ages):
                left = min(left, max(limits.limit_seconds - self._stuck_seconds, self._every))
            if left:
                # Not at every heartbeat: each rank that waits reads the files of all. But when
                # the answer may change, or a hang would last that much longer.
                self._waits_until = self._stuck_seconds + min(limits.hang_seconds / 6, left)
                return
            self._tell(heartbeats.hang(self._ages(now, since), self._stuck_seconds, quiet_seconds))
        except OSError as error:
            if not over:
                return
            _say(
                f"{self.own_name}: no progress in {self.place} for "
                f"{self._stuck_seconds:.0f} s, and {self.folder} does not answer ({error.strerror})"
            )
        os._exit(1)

    def _tell(self, hang: str) -> None:
        """Say it once for all ranks; training can't be asked any more. Raises: OSError."""
        file = self.folder / heartbeats.HANG_FILE
        before = heartbeats.written_at(file)
        if before is not None and before < self._born:
            file.unlink(missing_ok=True)
        with suppress(FileExistsError):  # another rank was first
            with file.open("x", encoding="utf-8") as stream:
                stream.write(hang + "\n")
            _say(hang)

    def _ages(
        self, now: float, since: float, rank: int | None = None
    ) -> list[tuple[heartbeats.Beat, float]]:
        beats = heartbeats.read_beats(self.folder, rank)
        return [(beat, now - written) for beat, written in beats if written > since]


def _say(text: str) -> None:
    print(f"sgt-ds train: {text}", file=sys.stderr, flush=True)
