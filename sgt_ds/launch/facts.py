"""Facts about a host: versions, GPUs, clock, free ports, and whether it sees shared files.

`python -m sgt_ds.launch.facts JSON` prints them as JSON; it runs on every host of a hostfile,
through ssh. Loads neither torch nor deepspeed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import sgt_ds
from sgt_ds.ports import is_free

# How long a network file system may take to show another host's new file.
VISIBLE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Question:
    """`shared`: a directory that all hosts should see, with a file `token` written by the asker.

    `ports`: those that should be free. `name`: of the host asked, in the file that it writes back.
    """

    name: str
    shared: str
    token: str
    ports: list[int]


@dataclass(frozen=True, slots=True)
class Facts:
    """One host. `project`: version and a digest of the package's source; `ds_configs`: a digest.

    `gpus`: NVIDIA's driver's count. `taken_ports`: of those asked for. `reads_shared`: whether it
    sees the asker's file; `clock`: its time.time().
    """

    hostname: str
    python: str
    torch: str
    deepspeed: str
    project: str
    ds_configs: str
    gpus: int
    taken_ports: list[int]
    reads_shared: bool
    clock: float


def facts(question: Question) -> Facts:
    """Look around on this host."""
    return Facts(
        hostname=socket.gethostname(),
        python=platform.python_version(),
        torch=_version("torch"),
        deepspeed=_version("deepspeed"),
        project=f"{sgt_ds.__version__}+{_digest(Path(sgt_ds.__file__).parent, '*.py')}",
        ds_configs=_digest(Path("ds_configs"), "*.json"),
        gpus=gpus_here(),
        taken_ports=[port for port in question.ports if not is_free("", port)],
        reads_shared=_shares(question),
        clock=time.time(),
    )


def gpus_here() -> int:
    """GPUs of this host, whichever of them a process may see. Asks no driver and loads no torch."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def answer_file(question: Question) -> Path:
    """Where the host asked writes, for the asker to read."""
    return Path(question.shared) / f".{question.token}.{question.name}"


def question_file(shared: Path, token: str) -> Path:
    """Where the asker writes, for all hosts to read."""
    return shared / f".{token}"


def _shares(question: Question) -> bool:
    mark = question_file(Path(question.shared), question.token)
    deadline = time.monotonic() + VISIBLE_SECONDS
    while True:
        try:
            if mark.read_text(encoding="utf-8") == question.token:
                answer_file(question).write_text(question.token, encoding="utf-8")
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _digest(folder: Path, pattern: str) -> str:
    """Of the names and contents of the files below a folder; 'missing' without one."""
    digest = hashlib.sha256()
    files = sorted(folder.rglob(pattern))
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:12] if files else "missing"


if __name__ == "__main__":
    print(json.dumps(asdict(facts(Question(**json.loads(sys.argv[1]))))))
