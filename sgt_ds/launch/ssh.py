"""Queries hosts through ssh, in parallel and with a time limit. Knows no run."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CONNECT_SECONDS = 10
# Where a hang was told, which is to be over within a minute: 50 s of it have gone by then.
HURRIED_SECONDS = 5
ANSWER_SECONDS = 30
KILLED_SECONDS = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """What one host said. `fault`: why it said nothing, or ''. `at`: when it had (time.time())."""

    output: str
    fault: str
    at: float


def module_command(
    module: str,
    arguments: Sequence[str],
    host: str | None,
    ssh_port: int | None,
    connect_seconds: int = CONNECT_SECONDS,
) -> list[str]:
    """The command that runs a module on `host`, in this directory with this Python.

    By ssh; `host` None is this machine, which needs none.
    """
    words = [sys.executable, "-m", module, *arguments]
    if host is None:
        return words
    remote = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(words)}"
    # A connection that is shared with other calls outlives this one, and may hang where a new one
    # won't.
    settings = (
        *("BatchMode=yes", f"ConnectTimeout={connect_seconds}"),
        *("ControlMaster=no", "ControlPath=none"),
    )
    options = [word for setting in settings for word in ("-o", setting)]
    port = [] if ssh_port is None else ["-p", str(ssh_port)]
    return ["ssh", *options, *port, "--", host, remote]


def ask(
    commands: Mapping[str, Sequence[str]], *, within_seconds: float = ANSWER_SECONDS
) -> dict[str, Answer]:
    """Run every host's command at once. Returns each host's answer."""
    running = {
        host: subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for host, command in commands.items()
    }
    answers: dict[str, Answer] = {}
    deadline = time.monotonic() + within_seconds
    for host, process in running.items():
        try:
            out, err = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # a child of it may hold its output open
                process.communicate(timeout=KILLED_SECONDS)
            answers[host] = Answer("", f"did not answer within {within_seconds:.0f} s", 0)
            continue
        fault = ""
        if process.returncode:
            lines = err.strip().splitlines()
            fault = lines[-1] if lines else f"ended with status {process.returncode}"
        answers[host] = Answer(out.strip(), fault, time.time())
    return answers
