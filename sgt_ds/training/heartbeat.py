"""Signs of life of this rank, and its end where nothing moves any more or nobody minds it.

A thread beside training: it needs no answer from training, which may wait in a collective for ever.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from sgt_ds.errors import SgtError, UserError
from sgt_ds.telemetry import heartbeats
from sgt_ds.training.sigterm import Sigterm

# Signs of life that all ranks together give to the file system that they share: each one a second,
# less often where they are many.
RANKS_A_SECOND = 64
# `sgt-ds train` gives a sign every two seconds. It may be suspended, or the shared directory stand
# still; after this silence, as this rank sees it, nobody minds the run any more.
SUPERVISOR_SECONDS = 120.0
# What starts ranks, as it stands at the beginning of command lines: a program or a module.
_LAUNCHERS = frozenset(
    {
        *("deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch"),
        *("sgt-ds", "sgt_ds", "sgt_ds.launch.multinode", "sgt_ds.launch.node"),
        *("mpirun", "mpiexec", "orted", "prterun", "prted"),
    }
)
# What may last long for good reasons: it is bounded by the time limit of collectives.
_PATIENT = frozenset({"start", "data", "report", "checkpoint", "validation", "end"})

# Of these, and of the first reduction, those in which only a save holds up signs of life: elsewhere a
# full disk cache may, or a library that loads or compiles and lets no thread go on.
_HEARD = frozenset({"data", "reduce", "end"})

# What forward, backward and optimizer may take, in units of the longest time that they have taken: in
# updates like earlier ones, and in those that may compile.
_USUAL, _COMPILING = 10.0, 2.0
_OWN_WORK = frozenset({"forward", "backward", "optimizer"})

# What gloo, NCCL and the store at which ranks meet say where the other end is gone, in small letters.
_SIGNS_OF_LOSS = (
    *("connection closed", "connection was closed", "connection was likely closed"),
    *("connection reset", "connection refused", "broken pipe", "failed to recv"),
    *("no route to host", "network is unreachable", "ncclremoteerror", "remote process exited"),
    *("communicator was aborted", "timed out waiting", "timed out after", "socket timeout"),
    *("collective operation timeout", "application timeout", "wait timeout"),
)

log = logging.getLogger("sgt_ds")

Item = TypeVar("Item")


class LostPeer(SgtError):
    """A rank that this one talks to has gone."""


class NotMet(SgtError):
    """Ranks did not meet at the start, or one went meanwhile: who is to blame can't be told."""


class Heartbeat:
    """Writes where this rank stands; ends the process where one part takes longer than it may.

    `hang_seconds`: limit of a part of an update; the run's own pace may lengthen that of forward,
    backward and optimizer. `patient_seconds`: limit of what may last, and of all: joining, data, this
    rank's own work in the first update with a new shape of loops (it may compile), the first
    reduction, reports, validation, checkpoints. `launched`: whether a launcher must stand above.
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
        """Whether a save is under way: its writes may hold up signs of life on the disk they share."""
        self._rank, self._host, self._alone = rank, socket.gethostname(), world_size == 1
        self._next_rank = (rank + 1) % world_size
        self._hang_seconds = hang_seconds
        self._patient_seconds = max(patient_seconds, hang_seconds)
        self._every = min(
            hang_seconds / 3, max(min(1.0, hang_seconds / 6), world_size / RANKS_A_SECOND)
        )
        self._step, self._part, self._count, self._patient = 0, "start", 0, True
        self._moved, self._first = 0, True
        self._seen: set[Hashable] = set()
        self._entered = time.monotonic()
        self._paces: dict[str, float] = {}  # by part: what this run's own pace allows, in seconds
        self._end, self._blames_peer = "", False
        self._watched = (0, 0)  # what `_stuck_seconds` counts: the part, and how far it is
        self._stuck_seconds = self._waits_until = 0.0
        self._born = 0.0  # by the file system's clock
        self._launchers = list(_launchers(os.getppid()))
        self._seeks_supervisor = True
        self._supervisor: float | None = None  # when it gave its last sign of life
        # A launcher that is gone already has left its ranks to the first process.
        self._launcher_ended = launched and os.getppid() == 1
        self._unminded_seconds = 0.0
        self._asked = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._born = self._write()
        except OSError as error:
            raise UserError(
                self.folder, None, f"cannot be written ({error.strerror}); choose another run_dir"
            ) from None
        self._sigterm = Sigterm()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._sigterm.wake()
        self._thread.join(timeout=self._every)
        self._sigterm.release()
        if error is None:
            self._end = heartbeats.LAUNCHER_GONE if self._launcher_ended else heartbeats.DONE
        else:
            self._end = " ".join(f"{error}".split())[:300] or repr(error)
        self._blames_peer = isinstance(error, (LostPeer, NotMet))
        with suppress(OSError):
            self._write()

    @property
    def launcher_lost(self) -> bool:
        """Whether what started this rank has gone: it saves and ends then."""
        return self._launcher_ended or self._unminded_seconds > SUPERVISOR_SECONDS

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self._alone

    @property
    def is_starting(self) -> bool:
        """Whether this rank joins, builds or loads: another one may never have been there."""
        return self._part == "start"

    @property
    def own_name(self) -> str:
        """The rank and its host, for a message."""
        return f"rank {self._rank} on {self._host}"

    @property
    def place(self) -> str:
        """The part in progress, for a message."""
        return f"{self._part} of step {self._step}"

    def update(self, step: int, shape: Hashable) -> None:
        """An update begins. `shape`: what the compiled blocks depend on; a new one may compile."""
        self._step, self._patient, self._first = step, shape not in self._seen, not self._seen
        self._seen.add(shape)

    def enter(self, part: str) -> None:
        """A part begins: on every rank the same ones, in the same order.

        Each stage of a start (joining, model, engine, data, loading) enters "start" anew.
        """
        now = time.monotonic()
        if self._part in _OWN_WORK:
            pace = (_COMPILING if self._patient else _USUAL) * (now - self._entered)
            self._paces[self._part] = max(pace, self._paces.get(self._part, 0.0))
        self._part, self._entered = part, now
        self._count += 1

    def moved(self) -> None:
        """The part goes on, and its time begins anew. Ranks may say so differently often."""
        self._moved += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For the length of the block, wait for the other ranks, within a part that may last.

        Who is late for it still has the part's own time; where nobody is, the wait is a hang.
        """
        part = self._part
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
                return
            now = time.monotonic()
            # While this process or its whole machine was stopped, nobody else waited for it either.
            seconds, then = min(now - then, 2 * self._every), now
            self._count_stuck(seconds)
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
        if self._sigterm.is_unheeded():
            os._exit(128 + signal.SIGTERM)

    def _count_stuck(self, seconds: float) -> None:
        now = (self._count, self._moved)
        if now != self._watched:
            self._watched, self._stuck_seconds, self._waits_until = now, 0.0, 0.0
            return
        self._stuck_seconds += seconds
        if self._stuck_seconds > max(self._hang_seconds, self._waits_until):
            self._judge()

    @property
    def _limit(self) -> float:
        part = self._part
        if part in _PATIENT or (self._patient and part in _OWN_WORK):
            return self._patient_seconds
        if self._first and part == "reduce":  # its connections are made then
            return self._patient_seconds
        return min(self._patient_seconds, max(self._hang_seconds, self._paces.get(part, 0.0)))

    @property
    def _silence(self) -> float:
        """How long this rank may give no sign: its thread goes on whatever training waits for."""
        return self._hang_seconds if self._part in _HEARD and not self.saves() else self._limit

    def _look_around(self, seconds: float) -> None:
        told, supervisor = (
            _time_of(self.folder / name)
            for name in (heartbeats.HANG_FILE, heartbeats.SUPERVISOR_FILE)
        )
        if told is not None and told >= self._born:
            os._exit(1)  # another rank, or the supervisor, has told it already
        if supervisor is not None and supervisor == self._supervisor:
            self._unminded_seconds += seconds
        else:
            self._supervisor, self._unminded_seconds = supervisor, 0.0
        if self._seeks_supervisor and supervisor is not None:
            # Between it and ranks that ssh has started stands no parent that they could watch.
            self._seeks_supervisor = False
            if pid := heartbeats.supervisor_here(self.folder):
                self._launchers += islice(_launchers(pid), 1)
        ended, _, _ = select.select(self._launchers, [], [], 0)
        self._launcher_ended |= bool(ended)

    def _write(self) -> float:
        """Write where this rank stands. Returns the time, by the file system's clock."""
        beat = heartbeats.Beat(
            rank=self._rank,
            host=self._host,
            pid=os.getpid(),
            step=self._step,
            part=self._part,
            count=self._count,
            limit_seconds=self._limit,
            silence_seconds=self._silence,
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
        over = self._stuck_seconds > self._limit
        quiet_seconds = self._limit / 2 if over else self._hang_seconds
        # While this rank may wait, what an earlier launch left here is no silent rank.
        since = self._born - (self._patient_seconds if over else 0.0)
        try:
            now = self._write()
            # Many may wait at a start: each looks at the one rank that comes next.
            ages = self._ages(now, since, None if over else self._next_rank)
            if over:
                left = heartbeats.awaited_seconds(ages, quiet_seconds)
            elif left := heartbeats.soonest_silence(ages):
                left = min(left, max(self._limit - self._stuck_seconds, self._every))
            if left:
                # Not at every sign of life: each rank that waits reads the files of all. But when
                # the answer may change, or a hang would last that much longer.
                self._waits_until = self._stuck_seconds + min(self._hang_seconds / 6, left)
                return
            # Told once for all ranks; training can't be asked any more.
            told = heartbeats.hang(self._ages(now, since), self._stuck_seconds, quiet_seconds)
            file = self.folder / heartbeats.HANG_FILE
            before = _time_of(file)
            if before is not None and before < self._born:
                file.unlink(missing_ok=True)
            with file.open("x", encoding="utf-8") as stream:
                stream.write(told + "\n")
            print(f"sgt-ds train: {told}", file=sys.stderr, flush=True)
        except FileExistsError:
            pass
        except OSError as error:
            if not over:
                return
            print(
                f"sgt-ds train: rank {self._rank} on {self._host}: nothing has moved in "
                f"{self.place} for {self._stuck_seconds:.0f} s, and {self.folder} does not answer "
                f"({error.strerror})",
                file=sys.stderr,
                flush=True,
            )
        os._exit(1)

    def _ages(
        self, now: float, since: float, rank: int | None = None
    ) -> list[tuple[heartbeats.Beat, float]]:
        beats = heartbeats.read_beats(self.folder, rank)
        return [(beat, now - written) for beat, written in beats if written > since]


@contextmanager
def lost_peers_told(heartbeat: Heartbeat) -> Iterator[None]:
    """Raises: LostPeer, one line, where a collective failed because another rank has gone; NotMet,
    one line, where ranks were still starting.
    """
    try:
        yield
    except RuntimeError as error:  # gloo's and NCCL's errors are nothing narrower
        said = str(error).strip()
        if heartbeat.is_alone or not any(sign in said.lower() for sign in _SIGNS_OF_LOSS):
            raise
        log.warning("%s: %s", heartbeat.place, said)
        cause = said.splitlines()[0][:300]
        if heartbeat.is_starting:
            raise NotMet(
                f"{heartbeat.own_name} did not meet the other ranks, or lost one that was "
                f"starting: {cause}"
            ) from error
        raise LostPeer(
            f"{heartbeat.own_name} lost another rank in {heartbeat.place}: {cause}"
        ) from error


def _time_of(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _launchers(pid: int) -> Iterator[int]:
    """A pidfd of each launcher from `pid` upwards: itself, its parent, as far as they are known.

    What stands above them, a shell or an sshd, may end before them for good reasons.
    """
    while pid > 1:
        try:
            descriptor = os.pidfd_open(pid)
            command = (Path("/proc") / str(pid) / "cmdline").read_text(errors="replace")
            status = (Path("/proc") / str(pid) / "stat").read_text(errors="replace")
        except OSError:
            return
        if not any(Path(word).name in _LAUNCHERS for word in command.split("\0")[:5]):
            os.close(descriptor)
            return
        yield descriptor
        pid = int(status.rpartition(")")[2].split()[1])
