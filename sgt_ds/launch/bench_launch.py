"""Whole runs that a benchmark starts through DeepSpeed's launcher on this host, and waits for."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from sgt_ds.errors import HERE, SgtError, UserError, refusal
from sgt_ds.launch.facts import gpus_here
from sgt_ds.launch.processes import RUN_ID_VARIABLE, kill_processes
from sgt_ds.ports import free_ports
from sgt_ds.telemetry import heartbeats

# Of a failed run's output, what its error shows.
LAST_LINES = 3
_GPUS = "CUDA_VISIBLE_DEVICES"


def launch_one(
    name: str,
    words: Sequence[str],
    ranks: int,
    output: Path,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a module with its arguments (`words`) on so many ranks, to its end.

    `output`: all that it prints. `environment`: added to this process's own. However it ends, none
    of its processes is left. Raises: SgtError with `name` and its last lines where it fails;
    UserError for GPUs that are not there.
    """
    command = [
        *(sys.executable, "-m", "deepspeed.launcher.runner", *gpu_arguments(ranks)),
        *("--master_port", str(free_ports()), "--module", *words),
    ]
    run_id = f"bench-{uuid.uuid4().hex}"
    own = {key: value for key, value in os.environ.items() if key != _GPUS}
    own |= {**(environment or {}), RUN_ID_VARIABLE: run_id}
    try:
        with output.open("w") as stream:
            status = subprocess.run(
                command, env=own, stdout=stream, stderr=stream, check=False
            ).returncode
    finally:
        kill_processes(run_id)  # the ranks lead sessions of their own: no signal reaches them
    if status != 0:
        said = [
            line
            for line in output.read_text(errors="replace").strip().splitlines()
            if not line.startswith("[20")  # the launcher's
        ]
        told = next((line for line in said if line.startswith("sgt-ds train: ")), None)
        last = told or " | ".join(said[-LAST_LINES:])
        # DeepSpeed's launcher passes on a rank's status, which is negative where a signal ended it.
        ended = f"ended with {status}"
        if 192 <= status < 255:  # 255 is what a process gives that exits with -1
            ended = f"ended: a rank was {heartbeats.killed_by(256 - status)}"
        error = SgtError(f"{name} {ended}: {last}; all of its output: {output}")
        if status == UserError.exit_code:  # the run has said what the user is to fix
            error.exit_code = status
        raise error


def gpu_arguments(ranks: int) -> tuple[str, str]:
    """The launcher's words for so many GPUs of this host, those that CUDA_VISIBLE_DEVICES names.

    On a host that has none they are ranks on the CPU. Raises: UserError where it names none or too
    few, or otherwise than by number.
    """
    if os.environ.get(_GPUS, "unset").strip(", ") == "" and gpus_here():
        raise UserError(
            _GPUS,
            None,
            "is set but names no GPU, and DeepSpeed's launcher would still take the first ones; "
            "list the free GPUs by number, or unset it",
        )
    # DeepSpeed's launcher takes the first GPUs of the host, whichever ones are to be seen.
    chosen = [gpu.strip() for gpu in os.environ.get(_GPUS, "").split(",") if gpu.strip()]
    if chosen and (len(chosen) < ranks or not all(gpu.isdecimal() for gpu in chosen)):
        raise UserError(
            _GPUS,
            None,
            f"does not list {ranks} GPUs by number ({','.join(chosen)}); list more, or ask for "
            "fewer ranks",
        )
    if chosen:
        return "--include", f"localhost:{','.join(chosen[:ranks])}"
    return "--num_gpus", str(ranks)


def make_scratch(scratch: Path) -> None:
    """Make the folder of a bench's runs. Raises: UserError."""
    try:
        scratch.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"{scratch} {refusal(error, 'created', instead='give another folder')}"
        raise UserError("--scratch", None, message) from None


@contextmanager
def scratch_for(given: Path | None) -> Iterator[Path]:
    """A folder for a bench's runs: the one given, which stays, or a temporary one, which goes
    unless the block fails by itself: what failed is there to be read.

    Raises: UserError where the one given holds something.
    """
    if given is not None:
        if given.exists() and (not given.is_dir() or any(given.iterdir())):
            raise UserError("--scratch", None, f"{given} is not an empty directory; give a new one")
        yield given
        return
    made = Path(tempfile.mkdtemp(prefix="sgt-ds-bench-"))
    try:
        yield made
    except Exception:
        raise
    except BaseException:  # stopped by the user
        shutil.rmtree(made, ignore_errors=True)
        raise
    shutil.rmtree(made)


def check_overrides(given: Iterable[str], own: Iterable[str]) -> None:
    """Check that no override of the user's sets what the benchmark sets itself.

    `given`, `own`: `key=value`, all of them sound. Raises: UserError.
    """
    taken = [word.partition("=")[0] for word in own]
    for word in given:
        name, _, text = word.partition("=")
        for key in _leaves(name, yaml.safe_load(text)):
            if any(f"{key}.".startswith(f"{mine}.") for mine in taken):
                message = "is set by the benchmark itself; leave it out"
                raise UserError(HERE, key, message)


def _leaves(key: str, value: Any) -> Iterator[str]:
    """The keys of single values that an override sets."""
    if not isinstance(value, dict):
        yield key
        return
    for name, inner in value.items():
        yield from _leaves(f"{key}.{name}", inner)


def path_override(key: str, path: Path) -> str:
    """The override that sets a key of a run to a path, whatever that would mean in YAML."""
    return f"{key}={json.dumps(str(path))}"


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Leave the block by SystemExit on SIGTERM, as by KeyboardInterrupt on SIGINT."""

    def leave(number: int, frame: FrameType | None) -> None:
        # `timeout` sends two; the second would cut short what ends the ranks.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
