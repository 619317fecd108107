"""Kills preparations at random moments and compares what comes of them: run by hand, with a seed.

    python tests/kill_storm.py --tokenizer tokenizer.json --kills 50 --seed 0 'c4/*.json.gz'

A set is prepared once without a kill. Then, for each way of starting (1, 2 and 3 processes; 2 and 3
MPI ranks, where there is an mpirun), sets are prepared under kills until that way has had its share
of them, and each finished set must have the same files with the same SHA-256. A kill hits, as the
seed has it, the whole job at once, its coordinator alone, or one worker alone.

Exit status 0 only where all sets were equal. Knows nothing of the package but its command.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PREPARE = [sys.executable, "-m", "sgt_ds", "data", "prepare"]
MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n"]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True)
class Way:
    """A way of starting."""

    processes: int
    mpi: bool

    def __str__(self) -> str:
        return f"mpirun -n {self.processes}" if self.mpi else f"--workers {self.processes}"

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line that prepares."""
        if self.mpi:
            return [*MPIRUN, str(self.processes), *PREPARE, *arguments]
        return [*PREPARE, *arguments, "--workers", str(self.processes)]


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 of every file below, hidden ones too."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def descendants(process: int) -> list[int]:
    """Ids of all processes that a process started, and those started, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [process]
    while queue:
        queue = [child for parent in queue for child in children.get(parent, [])]
        found += queue
    return found


def kill(process: subprocess.Popen[bytes], target: str, moments: random.Random) -> None:
    """Kill -9 the whole job, its first process, or one of the others."""
    others = descendants(process.pid)
    if target == "worker" and others:
        victims = [moments.choice(others)]
    elif target == "all":
        victims = [process.pid, *others]
    else:
        victims = [process.pid]
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


class Storm:
    """One input under kills."""

    def __init__(self, options: argparse.Namespace, root: Path) -> None:
        self.options, self.root = options, root
        self.moments = random.Random(options.seed)
        self.kills = self.sets = 0

    def arguments(self, name: str) -> list[str]:
        out, options = self.root / name, self.options
        return [
            *options.inputs,
            *("--tokenizer", options.tokenizer, "--out", str(out / "train")),
            *("--holdout", "0.05", "--holdout-out", str(out / "holdout")),
            *("--shard-tokens", str(options.shard_tokens)),
        ]

    def reference(self) -> tuple[dict[str, str], float]:
        """What an undisturbed run of one process gives, and its seconds."""
        started = time.monotonic()
        done = subprocess.run(
            Way(1, mpi=False).command(self.arguments("reference")), capture_output=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr.decode())
        return digests(self.root / "reference"), time.monotonic() - started

    def one_set(self, way: Way, longest_seconds: float, kills_left: int) -> tuple[str, int]:
        """Prepare one set under at most so many kills. Returns its directory's name and the kills."""
        name, kills = f"set-{self.sets}", 0
        self.sets += 1
        while True:
            process = subprocess.Popen(
                way.command(self.arguments(name)),
                env={**os.environ, **AS_ROOT},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            hit = kills < kills_left
            if hit:
                wait = self.moments.uniform(0.2, longest_seconds)
                target = self.moments.choice(("all", "first", "worker"))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=wait)
                hit = process.poll() is None
                if hit:
                    kill(process, target, self.moments)
            _, errors = process.communicate(timeout=1800)
            finished = (self.root / name / "train" / "manifest.json").exists()
            if hit and not finished:
                kills += 1
            elif process.returncode and not hit:
                raise SystemExit(f"{way}: exit status {process.returncode}\n{errors.decode()}")
            elif not hit:
                return name, kills


def main() -> int:
    """Run the storm and print what it did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("inputs", nargs="+")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--window", type=float, default=0.5, help="kills fall into this share of a whole run's time"
    )
    parser.add_argument("--shard-tokens", type=int, default=1 << 28)
    parser.add_argument("--scratch", type=Path, help="where sets are written (default: /tmp)")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="kill-storm-", dir=options.scratch))
    ways = [Way(processes, mpi=False) for processes in (1, 2, 3)]
    if shutil.which("mpirun"):
        ways += [Way(2, mpi=True), Way(3, mpi=True)]
    equal = True
    try:
        storm = Storm(options, root)
        wanted, seconds = storm.reference()
        window = options.window * seconds
        print(f"reference: {len(wanted)} files in {seconds:.1f} s", flush=True)
        for number, way in enumerate(ways):
            share = options.kills * (number + 1) // len(ways) - options.kills * number // len(ways)
            done = 0
            while done < share:
                name, kills = storm.one_set(way, window / way.processes, share - done)
                done += kills
                found = digests(root / name)
                same = found == wanted
                equal &= same
                result = {"way": str(way), "kills": kills, "of": f"{done}/{share}", "equal": same}
                print(json.dumps(result), flush=True)
                if not same:
                    keys = wanted.keys() | found.keys()
                    print([key for key in sorted(keys) if wanted.get(key) != found.get(key)])
                shutil.rmtree(root / name)
        digest = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()
        print(
            f"{options.kills} kills, seed {options.seed}: {'equal' if equal else 'PARTED'} {digest}"
        )
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
