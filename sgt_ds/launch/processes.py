"""The processes of one run on this machine: found by the id each carries, and only those killed.

`python -m sgt_ds.launch.processes list|kill RUN_ID` does the same on another host, through ssh.
Knows no launcher. Needs Linux (`/proc`, pidfd).
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sgt_ds.launch.ssh import CONNECT_SECONDS, HURRIED_SECONDS, ask, module_command

RUN_ID_VARIABLE = "SGT_RUN_ID"
"""Environment variable that every process of a run carries."""

_RUN_ID = re.compile(r"[A-Za-z0-9_.-]{8,200}")


def is_run_id(text: str) -> bool:
    """Whether `text` can be a run's id: safe on a command line, and long enough to be its own."""
    return _RUN_ID.fullmatch(text) is not None and not text.startswith("-")


def processes_of(run_id: str) -> list[int]:
    """Process ids on this machine whose environment carries `run_id`; zombies are left out."""
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and int(entry.name) != os.getpid() and _carries(entry, run_id)
    ]


def kill_processes(run_id: str, *, within_seconds: float = 10.0) -> int:
    """Kill every process of the run on this machine, and those that they start meanwhile.

    Returns how many are left after `within_seconds`: 0, or something holds them in the kernel.
    """
    deadline = time.monotonic() + within_seconds
    while found := processes_of(run_id):
        for pid in found:
            _kill_exactly(pid, run_id)
        if time.monotonic() > deadline:
            return len(found)
        time.sleep(0.05)
    return 0


def on_hosts(
    action: str,
    run_id: str,
    hosts: Sequence[str],
    ssh_port: int | None,
    *,
    hurried: bool = False,
) -> dict[str, str]:
    """Run `action` on every host at once. Returns each host's answer, or why there is none.

    `hurried`: give up sooner on a host that cannot be reached.
    """
    module = "sgt_ds.launch.processes"
    patience = HURRIED_SECONDS if hurried else CONNECT_SECONDS
    answers = ask(
        {host: module_command(module, [action, run_id], host, ssh_port, patience) for host in hosts}
    )
    return {
        host: f"failed ({answer.fault})" if answer.fault else answer.output.split("\n")[-1]
        for host, answer in answers.items()
    }


def main(arguments: Sequence[str]) -> int:
    """`list RUN_ID` prints how many processes there are, `kill RUN_ID` how many are left."""
    if len(arguments) != 2 or arguments[0] not in ("list", "kill") or not is_run_id(arguments[1]):
        print("usage: python -m sgt_ds.launch.processes list|kill RUN_ID", file=sys.stderr)
        return 2
    action, run_id = arguments
    print(len(processes_of(run_id)) if action == "list" else kill_processes(run_id))
    return 0


def _carries(entry: Path, run_id: str) -> bool:
    wanted = f"{RUN_ID_VARIABLE}={run_id}".encode()
    try:
        # A zombie has no environment left, so it drops out here.
        return wanted in (entry / "environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return False


def _kill_exactly(pid: int, run_id: str) -> None:
    """Kill `pid` if it still is a process of the run: its number may have passed to another."""
    try:
        with _pidfd(pid) as descriptor:
            if _carries(Path("/proc") / str(pid), run_id):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return


@contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
