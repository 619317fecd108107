"""DeepSpeed's launcher of one host, under a name of its own, that tells what ended a rank.

The raw launcher of another job ends with `pkill -f "… deepspeed.launcher.launch"` on every host of
that job; what is called otherwise survives it. DeepSpeed's own exits with the status of whichever
ended rank it polls first, which may be one that lost a peer and not the one that was killed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from deepspeed.launcher import launch

from sgt_ds.launch.environment import SIGNS_VARIABLE
from sgt_ds.telemetry import heartbeats

# A shared disk may never answer, and the other ranks are to end all the same.
LONGEST_WRITE_SECONDS = 5.0


class RankProcess(subprocess.Popen[bytes]):
    """A rank, as DeepSpeed's launcher starts and polls it."""

    _all: ClassVar[list[RankProcess]] = []

    def __init__(self, command: list[str], **settings: Any) -> None:
        super().__init__(command, **settings)
        self._rank = int(settings["env"]["RANK"])
        self._all.append(self)

    def poll(self) -> int | None:
        """Its exit status. Who was killed by then is told: after this the launcher ends the rest."""
        status = super().poll()
        if status:
            if status < 0:
                self._tell(-status)
            for other in self._all:
                if other.returncode is None and (number := _killed(other.pid)):
                    other._tell(number)
            self._all.clear()
        return status

    def _tell(self, number: int) -> None:
        kill = heartbeats.Kill(self._rank, socket.gethostname(), self.pid, number)
        writer = threading.Thread(target=_write, args=(kill,), daemon=True)
        writer.start()
        writer.join(LONGEST_WRITE_SECONDS)


def _write(kill: heartbeats.Kill) -> None:
    with suppress(OSError):  # a full disk, too
        heartbeats.write_kill(Path(os.environ[SIGNS_VARIABLE]), kill)


def _killed(pid: int) -> int:
    """The signal that ended a child, which stays to be waited for; 0 where none has."""
    with suppress(ChildProcessError):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None and ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
            return ended.si_status
    return 0


def main() -> None:
    """Run DeepSpeed's launcher; as it is where no supervisor wants to know."""
    if SIGNS_VARIABLE in os.environ:
        launch.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": RankProcess})
    launch.main()


if __name__ == "__main__":
    main()
