"""Real training runs for tests that start many: ranks forked from a process that has imported all.

Each rank is a process of its own that runs what `python -m sgt_ds.train` runs; it is ready in a
fraction of a second instead of several. `Nursery` is the tests' side, `main` the process that forks.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import runs

from sgt_ds.cli import VERBS
from sgt_ds.ports import free_ports

TRAIN = "sgt_ds.train:main"


@dataclass
class Ranks:
    """The processes of one start of a run. `log`: what all of them print."""

    nursery: Nursery
    pids: list[int]
    log: Path
    ended: dict[int, int] = field(default_factory=dict)

    def is_running(self) -> bool:
        """Whether any rank has not ended yet."""
        return any(self.status(pid, 0.0) is None for pid in self.pids)

    def kill(self) -> None:
        """SIGKILL to all ranks, and wait until they are gone."""
        for pid in self.pids:
            if pid not in self.ended:
                os.kill(pid, signal.SIGKILL)
        self.statuses()

    def statuses(self, timeout: float = 240) -> list[int]:
        """Exit status of each rank, when all have ended; negative: by a signal."""
        deadline = time.monotonic() + timeout
        for pid in self.pids:
            if self.status(pid, max(0.0, deadline - time.monotonic())) is None:
                raise AssertionError(f"runs for more than {timeout} s\n{self.said()[-3000:]}")
        return [self.ended[pid] for pid in self.pids]

    def end(self, expect: int = 0) -> str:
        """Wait for the end, check each rank's exit status, and return what they printed."""
        statuses = self.statuses()
        assert statuses == [expect] * len(self.pids), f"{statuses}\n{self.said()[-4000:]}"
        return self.said()

    def said(self) -> str:
        """What they printed so far."""
        return self.log.read_text(errors="replace")

    def status(self, pid: int, timeout: float) -> int | None:
        """Exit status of one rank; None where it has not ended by then."""
        if pid not in self.ended:
            answer = self.nursery.ask(wait=pid, timeout=timeout)
            if answer["status"] is None:
                return None
            self.ended[pid] = answer["status"]
        return self.ended[pid]


class Nursery:
    """Forks ranks on request, until the block ends."""

    def __enter__(self) -> Nursery:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=runs.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._started = 0
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it kills what still runs, and ends
        self._process.wait(timeout=60)

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request, one answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def start(
        self, log: Path, arguments: Sequence[str | Path], *, ranks: int = 1, entry: str = TRAIN
    ) -> Ranks:
        """Start the ranks of a run: `entry` (module:function) with the arguments."""
        port = str(free_ports())
        pids = []
        for rank in range(ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank}
            sizes = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {n: str(value) for n, value in (place | sizes | rendezvous).items()}
            answer = self.ask(
                entry=entry,
                arguments=[str(argument) for argument in arguments],
                environment=environment,
                log=str(log),
            )
            pids.append(answer["pid"])
        return Ranks(self, pids, log)


def main() -> int:
    """Serve requests from stdin; in a child, run what was asked for and return its exit status."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is imported logs to stdout
    verbs = [f"sgt_ds.cli.{verb}" for verb in VERBS]
    rooms = ("sgt_ds.train", "sgt_ds.training.build", "sgt_ds.inference.conversion")
    for module in (*rooms, *verbs):
        importlib.import_module(module)
    children: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            status = _wait(request["wait"], request["timeout"])
            if status is not None:
                children.discard(request["wait"])
            answer: dict[str, Any] = {"status": status}
        else:
            pid = os.fork()
            if pid == 0:
                answers.close()
                return _child(**request)
            children.add(pid)
            answer = {"pid": pid}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    return 0


def _wait(pid: int, timeout: float) -> int | None:
    deadline = time.monotonic() + timeout
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.01)


def _child(entry: str, arguments: list[str], environment: dict[str, str], log: str) -> int:
    """A rank: nothing of the process that forked it but what that had imported."""
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    module, _, name = entry.partition(":")
    function: Callable[[list[str]], int | None] = getattr(importlib.import_module(module), name)
    try:
        return function(arguments) or 0
    except Exception:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    sys.exit(main())
