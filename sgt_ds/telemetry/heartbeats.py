"""Heartbeats: one small file per rank, and what comparing them shows of a run that hangs or fell.

Knows no process group and starts no thread. Compares ages, which its readers find without trusting
hosts' clocks: by the file system's, or by how long a file has not changed under their eyes.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeVar

HANG_FILE = "hang.txt"
SUPERVISOR_FILE = "supervisor"

# Words of a rank's end that are no failure of its own.
DONE = "done"
LAUNCHER_GONE = "its launcher is gone"


@dataclass(frozen=True, slots=True)
class Beat:
    """Where one rank stands.

    `part`: of the update in progress. `count`: parts entered so far; all ranks enter the same ones
    in the same order. `limit_seconds`: how long the part may take before it counts as a hang;
    `silence_seconds`: how long the rank may give no sign meanwhile; `seconds`: how long the part
    has taken, as its own rank counts. `asked`: whether a SIGTERM came.
    `end`: '' while the rank lives; then why it ended, and `blames_peer` says that it lost another.
    """

    rank: int
    host: str
    pid: int
    step: int
    part: str
    count: int
    limit_seconds: float
    silence_seconds: float
    seconds: float = 0.0
    asked: bool = False
    end: str = ""
    blames_peer: bool = False

    @property
    def name(self) -> str:
        """The rank and where it runs."""
        return _name(self.rank, self.host, self.pid)

    @property
    def place(self) -> str:
        """What it does."""
        return f"{self.part} of step {self.step}"


@dataclass(frozen=True, slots=True)
class Kill:
    """A signal ended this rank's process, as the launcher of its host saw."""

    rank: int
    host: str
    pid: int
    number: int

    @property
    def name(self) -> str:
        """The rank and where it ran."""
        return _name(self.rank, self.host, self.pid)


_Sign = TypeVar("_Sign", Beat, Kill)


def write_beat(folder: Path, beat: Beat) -> float:
    """Write the rank's file, whole; it need not survive a power cut.

    Returns the time at which it was written, by the file system's clock.
    """
    path = folder / f"rank-{beat.rank:05d}.json"
    try:
        _write(path, beat)
    except OSError:
        if not path.exists():
            raise
        os.utime(path)  # a full disk: that it lives can still be told
    return path.stat().st_mtime


def read_beats(folder: Path, rank: int | None = None) -> list[tuple[Beat, float]]:
    """Every rank's beat with the time (seconds, the file system's clock) at which it was written.

    `rank`: read that one's only. What can't be read is left out: the launch may be just starting
    or just ending.
    """
    return _read(folder, "rank-*.json" if rank is None else f"rank-{rank:05d}.json", Beat)


def write_kill(folder: Path, kill: Kill) -> None:
    """Write what ended the rank, beside its last heartbeat."""
    _write(folder / f"killed-{kill.rank:05d}.json", kill)


def read_kills(folder: Path) -> list[tuple[Kill, float]]:
    """What signals ended, each with the time at which that was written; as `read_beats`."""
    return _read(folder, "killed-*.json", Kill)


def _write(path: Path, sign: Beat | Kill) -> None:
    """Whole or not at all."""
    temporary = path.with_suffix(f".{sign.pid}.tmp")
    temporary.write_text(json.dumps(asdict(sign)), encoding="utf-8")
    temporary.replace(path)


def _read(folder: Path, pattern: str, kind: type[_Sign]) -> list[tuple[_Sign, float]]:
    found = []
    for path in sorted(folder.glob(pattern)):
        try:
            sign = kind(**json.loads(path.read_text(encoding="utf-8")))
            found.append((sign, path.stat().st_mtime))
        except (OSError, ValueError, TypeError):
            continue
    return found


def write_supervisor(folder: Path) -> float:
    """Tell that this process looks after the ranks. Returns when, by the file system's clock."""
    with suppress(OSError):  # a full disk: that someone does can still be told
        (folder / SUPERVISOR_FILE).write_text(f"{os.getpid()} {socket.gethostname()}\n")
    return renew_supervisor(folder)


def renew_supervisor(folder: Path) -> float:
    """The supervisor's heartbeat. Returns its time, by the file system's clock."""
    path = folder / SUPERVISOR_FILE
    path.touch()
    return path.stat().st_mtime


def written_at(path: Path) -> float | None:
    """When a file was written, by the file system's clock; None where it is not there."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def supervisor_here(folder: Path) -> int | None:
    """The supervisor's process id, where it runs on this host."""
    said = (folder / SUPERVISOR_FILE).read_text(encoding="utf-8", errors="replace")
    pid, _, host = said.strip().partition(" ")
    return int(pid) if pid.isdecimal() and host == socket.gethostname() else None


def silent(ages: Iterable[tuple[Beat, float]]) -> list[tuple[Beat, float]]:
    """Ranks that have given no heartbeat for longer than they may, with their age."""
    return [(beat, age) for beat, age in ages if not beat.end and age > beat.silence_seconds]


def soonest_silence(ages: Iterable[tuple[Beat, float]]) -> float:
    """Seconds until the first rank is silent if none gives another sign; 0 where one is."""
    left = (beat.silence_seconds - age for beat, age in ages if not beat.end)
    return max(0.0, min(left, default=math.inf))


def awaited_seconds(ages: Sequence[tuple[Beat, float]], quiet_seconds: float) -> float:
    """How long a rank that is furthest behind may take, or be silent, from now on; 0: it is late.

    Its part may be one that lasts (slow data) while the others wait where nothing should. Where any
    rank has been quiet for longer than `quiet_seconds`, no one is waited for.
    """
    living = [(beat, age) for beat, age in ages if not beat.end]
    oldest = max((age for _, age in living), default=0.0)
    if oldest >= quiet_seconds:
        return 0.0
    behind = min((beat.count for beat, _ in living), default=0)
    left = (beat.limit_seconds - beat.seconds for beat, _ in living if beat.count == behind)
    return max(0.0, min(max(left, default=0.0), quiet_seconds - oldest))


def hang(
    ages: Sequence[tuple[Beat, float]],
    stuck_seconds: float,
    quiet_seconds: float | None = None,
) -> str:
    """One line on a run in which nothing has moved for `stuck_seconds`: who is late, who waits.

    `ages`: each beat with the seconds since it was given. `quiet_seconds`: silence after which a
    rank counts as gone; None: half of `stuck_seconds`.
    """
    longest = stuck_seconds / 2 if quiet_seconds is None else quiet_seconds
    living = [(beat, age) for beat, age in ages if not beat.end]
    quiet = [(beat, age) for beat, age in living if age > longest]
    heard = [beat for beat, age in living if age <= longest]
    if quiet:
        told = "; ".join(
            f"{beat.name} has given no sign of life for {age:.0f} s, last in {beat.place}"
            for beat, age in quiet
        )
        hint = "its process is stopped, or its host is gone or cut off"
        return f"{told} ({hint}){_waiting(heard, ', ')}"
    behind = min((beat.count for beat in heard), default=0)
    late = [beat for beat in heard if beat.count == behind]
    ahead = [beat for beat in heard if beat.count > behind]
    if not ahead:
        return (
            f"no progress for {stuck_seconds:.0f} s and no rank is late: "
            f"{_waiting(heard, '')}; check the network between the hosts"
        )
    told = ", ".join(f"{beat.name}" for beat in late)
    return (
        f"{told} {'are' if len(late) > 1 else 'is'} late: in {late[0].place} for "
        f"{stuck_seconds:.0f} s{_waiting(ahead, '; ')}"
    )


def killed_by(number: int) -> str:
    """`killed by signal 11 (SIGSEGV)`, and for SIGKILL the usual sender."""
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time one
        return f"killed by signal {number}"
    sender = "; perhaps by the kernel, for lack of memory" if number == signal.SIGKILL else ""
    return f"killed by signal {number} ({name}{sender})"


def deaths(
    beats: Iterable[tuple[Beat, float]],
    kills: Sequence[Kill] = (),
    status_signal: int = 0,
) -> str:
    """Of a launch whose processes all ended: which ranks fell first, and where. '' if none did.

    A rank that was killed left no word; one that failed by itself said why; the others lost a peer,
    were asked to end because one had fallen, or ended well because some saw their launcher gone.
    `kills`: what launchers saw. `status_signal`: the signal in mpirun's exit status, which names no
    rank; 0: none.
    """
    known = [beat for beat, _ in beats]
    well = (DONE, LAUNCHER_GONE)
    failed = [beat for beat in known if beat.end and not beat.blames_peer and beat.end not in well]
    if failed:
        first = failed[0]
        # What names its step has happened there, whatever the rank did then.
        where = "" if first.end.startswith("step ") else f" in {first.place}"
        return f"{first.name} failed{where}: {first.end}"
    gone = [beat for beat in known if not beat.end]
    left = sorted({beat.host for beat in known if beat.end == LAUNCHER_GONE})
    numbers = {(kill.rank, kill.pid): kill.number for kill in kills}
    signs = {(beat.rank, beat.pid) for beat in known}
    unseen = [kill for kill in kills if (kill.rank, kill.pid) not in signs]
    # Those that were asked to end are not the ones that fell.
    fell = [beat for beat in gone if not beat.asked or (beat.rank, beat.pid) in numbers]
    if unseen and not fell:
        told = _ends([(kill.name, kill.number) for kill in unseen])
        return f"{told}, before {'its' if len(unseen) == 1 else 'their'} first sign of life"
    if not gone:
        return f"the launcher on {', '.join(left)} died; all ranks exited" if left else ""
    gone = fell or gone
    ended = [(beat.name, numbers.get((beat.rank, beat.pid), 0)) for beat in gone]
    if len(fell) == 1 and not numbers:
        ended = [(fell[0].name, status_signal)]
    everyone = len(known) if len(gone) == len(known) > 1 else 0
    return f"{_ends(ended, everyone)}, last seen in {gone[0].place}"


def _name(rank: int, host: str, pid: int) -> str:
    return f"rank {rank} on {host} (process {pid})"


def _ends(ended: Sequence[tuple[str, int]], everyone: int = 0) -> str:
    """Who ended how: names, each with the signal or 0. `everyone`: the number of ranks where all did, else 0."""
    numbers = dict.fromkeys(number for _, number in ended)
    told = []
    for number in numbers:
        names = [name for name, own in ended if own == number]
        whole = everyone and len(numbers) == 1
        who = f"all {everyone} ranks" if whole else ", ".join(names)
        was = "were" if len(names) > 1 else "was"
        told.append(f"{who} {was} {killed_by(number)}" if number else f"{who} died")
    return "; ".join(told)


def _waiting(beats: Sequence[Beat], before: str) -> str:
    """`ranks 0, 1 wait in reduce of step 7`, by place."""
    if not beats:
        return ""
    places = []
    for place, group in groupby(sorted(beats, key=lambda beat: beat.place), lambda b: b.place):
        ranks = [str(beat.rank) for beat in group]
        several = len(ranks) > 1
        places.append(
            f"rank{'s' if several else ''} {', '.join(ranks)} wait{'' if several else 's'} in "
            f"{place}"
        )
    return before + "; ".join(places)
