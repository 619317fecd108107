"""DeepSpeed's runner, changed to leave other jobs alone: it finds processes by the run's id.

`python -m sgt_ds.launch.multinode …` takes the runner's own arguments. On SIGTERM the original runs
`pkill -f "… deepspeed.launcher.launch"` on every host, which hits every job of the user. On every
host it starts `sgt_ds.launch.node`, which tells what ended a rank. Of the variables that the runner
passes on by itself, secrets and shell text stay here.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deepspeed.launcher import launch, runner

from sgt_ds.errors import SgtError
from sgt_ds.launch.environment import is_fit_for_a_command_line
from sgt_ds.launch.processes import RUN_ID_VARIABLE

_ORIGINAL_NODE = "deepspeed.launcher.launch"
_OWN_NODE = "sgt_ds.launch.node"


class _Exports:
    """What a runner passes on. DeepSpeed would also take secrets, and text that a shell reads."""

    def add_export(self, key: str, var: str) -> None:
        """Leave out what may not be on a command line; lines of `.deepspeed_env` are checked."""
        if is_fit_for_a_command_line(key.strip(), var.strip()):
            super().add_export(key, var)  # type: ignore[misc]  # the runner's, beside this class


class PdshRunner(_Exports, runner.PDSHRunner):  # type: ignore[misc]  # DeepSpeed has no types
    """pdsh with an end that is exact, and with nodes that a stranger's `pkill -f` does not find."""

    def parse_user_args(self) -> list[str]:
        """The arguments for the shells of the hosts; DeepSpeed quotes spaces and nothing else."""
        return [shlex.quote(argument) for argument in self.args.user_args]

    def get_cmd(
        self, environment: dict[str, str], active_resources: dict[str, list[int]]
    ) -> tuple[list[str], list[str], dict[str, str]]:
        """The command, the one that ends it everywhere, and the environment of both."""
        command, kill, environment = super().get_cmd(environment, active_resources)
        here = shlex.quote(str(Path.cwd()))
        command = [f"cd {here};" if part.startswith("cd ") else part for part in command]
        to_hosts = kill[: kill.index("pkill -f ")]
        end = f"cd {here}; {shlex.quote(sys.executable)} -m sgt_ds.launch.processes kill"
        kill = [*to_hosts, f"{end} {os.environ[RUN_ID_VARIABLE]}"]
        return command, kill, environment


class OpenMpiRunner(_Exports, runner.OpenMPIRunner):  # type: ignore[misc]
    """mpirun, with the variables that may be on a command line."""


class _Started(subprocess.Popen[bytes]):
    """What the runner starts, with the launcher of a host under our name."""

    def __init__(self, command: list[str], **settings: Any) -> None:
        own = [_OWN_NODE if part == _ORIGINAL_NODE else part for part in command]
        super().__init__(own, **settings)


def main(arguments: list[str] | None = None) -> Any:
    """Run DeepSpeed's runner with the classes of this module."""
    if launch.__name__ != _ORIGINAL_NODE:
        raise SgtError(f"DeepSpeed calls the launcher of a host {launch.__name__} now")
    runner.PDSHRunner, runner.OpenMPIRunner = PdshRunner, OpenMpiRunner
    runner.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": _Started})
    return runner.main(arguments)


if __name__ == "__main__":
    main()
