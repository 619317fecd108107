"""What tests fetch with pip, and commands that leave nothing behind. Skips where no index answers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import NoReturn

import pytest

# Small, and what the package needs itself.
PROBE = "tqdm"
# With -vv. That one of several indexes lacks the package is an answer.
_SILENT = re.compile(r"^ *(?:Could not fetch URL (?!.* 404 )|Ignoring indexes)", re.MULTILINE)


def pip_or_skip(arguments: list[str], what: str, *, timeout: float = 300) -> None:
    """Run `python -m pip` with `arguments`; where it fails, skip the test or fail it.

    `what`: as in "pip cannot fetch the source of transformers".
    """
    command = [sys.executable, "-m", "pip", *arguments]
    done = run_whole(command, timeout=timeout)
    if done.returncode:
        skip_or_fail(done.stderr, what)


def skip_or_fail(stderr: str, what: str) -> NoReturn:
    """Skip the test where no index can be reached; else what pip was asked for is at fault."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    # Behind its errors pip may praise a newer pip.
    said = [line for line in lines if line.startswith("ERROR:")] or lines or ["no reason given"]
    told = f"pip cannot fetch {what}: {said[-1].strip()}"
    if index_answers():
        pytest.fail(f"{told}\n{stderr[-3000:]}", pytrace=False)
    pytest.skip(f"{told} (no package index can be reached)")


def index_answers() -> bool:
    """Whether pip can fetch anything from the index that it is set to; at most 40 seconds."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pip", "download", "-vv", "--no-deps", "--no-cache-dir"]
        command += ["--retries", "1", "--timeout", "10", PROBE, "-d", place]
        # A folder beside the index may hold it too.
        done = run_whole(command, timeout=40)
    return done.returncode == 0 and not _SILENT.search(done.stdout)


def run_whole(
    command: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command and capture what it prints; on timeout end it with all that it started.

    Its return code is negative then, and the last line of stderr says so.
    """
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            stdout, stderr = process.communicate()
            stderr += f"\nERROR: took more than {timeout:g} s"
        except BaseException:  # as when the test's own time is over
            _kill(process)
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it ended at this moment
        os.killpg(process.pid, signal.SIGKILL)
