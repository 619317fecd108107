"""Whether this rank is orphaned: watches its launcher and the supervisor of its run.

Knows no part of an update, and ends nothing.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from sgt_ds.telemetry import heartbeats

# `sgt-ds train` gives a sign every two seconds. It may be suspended, or the shared directory stand
# still; after this silence, as this rank sees it, no one minds the run any more.
SUPERVISOR_SECONDS = 120.0
# What starts ranks, as it stands at the beginning of command lines: a program or a module.
_LAUNCHERS = frozenset(
    {
        *("deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch"),
        *("sgt-ds", "sgt_ds", "sgt_ds.launch.multinode", "sgt_ds.launch.node"),
        *("mpirun", "mpiexec", "orted", "prterun", "prted"),
    }
)


class LauncherWatch:
    """The launchers above this rank, and the supervisor: by their processes on this host.

    `folder`: where the supervisor gives heartbeats, by which ranks of other hosts know it.
    `launched`: whether a launcher must stand above.
    """

    def __init__(self, folder: Path, *, launched: bool) -> None:
        self._folder = folder
        self._ends = select.poll()
        self._watch(_launchers(os.getppid()))
        # A launcher that is gone already has left its ranks to the first process.
        self.launcher_ended = launched and os.getppid() == 1
        """Whether a launcher, or the supervisor on this host, has ended."""
        self._seeks_supervisor = True
        self._sign: float | None = None  # when the supervisor gave its last one
        self._silent_seconds = 0.0

    @property
    def is_orphaned(self) -> bool:
        """Whether no one minds this rank any more."""
        return self.launcher_ended or self._silent_seconds > SUPERVISOR_SECONDS

    def look_at_launchers(self) -> None:
        """Look at the processes on this host. Asks no disk."""
        self.launcher_ended |= bool(self._ends.poll(0))

    def look_at_supervisor(self, seconds: float) -> None:
        """Look for the supervisor's sign. `seconds`: since the last look.

        Raises: OSError where the folder does not answer.
        """
        sign = heartbeats.written_at(self._folder / heartbeats.SUPERVISOR_FILE)
        if sign is not None and sign == self._sign:
            self._silent_seconds += seconds
        else:
            self._sign, self._silent_seconds = sign, 0.0
        if self._seeks_supervisor and sign is not None:
            # Between it and ranks that ssh has started stands no parent that they could watch.
            if pid := heartbeats.supervisor_here(self._folder):
                self._watch(islice(_launchers(pid), 1))
            self._seeks_supervisor = False

    def _watch(self, processes: Iterable[int]) -> None:
        """Have `look_at_launchers` see when one of them ends. `processes`: their pidfds."""
        for process in processes:
            self._ends.register(process, select.POLLIN)


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
