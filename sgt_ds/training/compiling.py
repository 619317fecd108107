"""Compiled code kept for the next start. Knows no model and no step.

torch keeps what it compiled in a folder of each host, which a new machine or container does not
have, and which hosts must not share. A kept file holds what they compiled, whole or absent, for all
hosts.

Nothing is taken out of it: torch does not tell which entries a run has asked for, the kinds of late
growth lie longest before they are needed and stall training where they are gone, and a host that
still has an entry would add it again. Without new shapes, settings or code it stops growing.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import re
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from sgt_ds.errors import UserError, refusal
from sgt_ds.files import atomic_writer, take_lock
from sgt_ds.training.engine import Ranks

log = logging.getLogger(__name__)

_TORCH_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
# Triton's kernels are in torch's graphs as well.
_LEFT_OUT = frozenset({"locks", "triton"})
# fxgraph/xx/KEY/HASH
_GRAPH_PARTS = 4


class CompileCache:
    """One file of all that runs which name it compiled, by version of torch and kind of device.

    Each host has a folder of its own for it, in which nothing else lies.
    """

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        cuda = ranks.device.type == "cuda"
        # Code for a CPU is code for its instruction set, which torch's keys do not hold.
        processor = f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"
        device = torch.cuda.get_device_name(ranks.device) if cuda else processor
        name = re.sub(r"[^\w.+-]+", "-", f"torch-{torch.__version__}-{device}")
        self.file = folder / f"{name}.zip"
        self._ranks = ranks
        self._kept: int | None = None

    def load(self) -> None:
        """Let torch compile into this cache's own folder, with what the file holds in it.

        In `TORCHINDUCTOR_CACHE_DIR`, where that is set. One rank of each host unpacks. Collective.
        Raises: UserError where there is no such folder.
        """
        given = os.environ.get(_TORCH_FOLDER)
        own = "sgt-ds-" + hashlib.sha256(str(self.file.resolve()).encode()).hexdigest()[:16]
        self._local = ((Path(given) if given else _private_folder()) / own).resolve()
        os.environ[_TORCH_FOLDER] = str(self._local)
        self._kept = _compiled_here()
        if self._ranks.local_rank == 0:
            try:
                with zipfile.ZipFile(self.file) as kept:
                    _unpack(kept, self._local)
            except FileNotFoundError:
                pass
            except Exception as error:  # zipfile raises a dozen kinds where bits have turned
                log.warning("%s cannot be read (%s); compiling from scratch", self.file, error)
            if self._new_here():  # of a run that ended before it could keep it
                self._kept = None
        dist.barrier(group=self._ranks.host_group)

    def keep(self, beside: int = 0) -> None:
        """Add to the file what any rank has compiled since it was last written. Collective.

        While no rank compiles: one that does would leave half a file. `beside`: kinds that a
        process beside this rank has compiled so far. What it is at is left out: torch holds a lock
        on a library while it is made, and names other files once they are whole.
        """
        compiled = _compiled_here() + beside
        (changed,) = self._ranks.any(compiled != self._kept)
        self._kept = compiled
        if not changed:
            return
        # Hosts compile the same as a rule: what rank 0 has written, the others need not.
        self._ranks.on_main(self._add)
        if self._ranks.local_rank == 0 and not self._ranks.is_main:
            self._add()

    def _add(self) -> None:
        try:
            if not self._new_here():
                return
            self.file.parent.mkdir(parents=True, exist_ok=True)
            # Hosts, and other runs, add to it too.
            with _alone(self.file), atomic_writer(self.file) as stream, _zip(stream) as target:
                held = self._copy_into(target)
                for name in _members(self._local):
                    if _entry(name) not in held:
                        target.write(self._local / name, name)
        except (OSError, ValueError) as error:  # costs time at the next start, and nothing else
            log.warning("%s cannot be written (%s)", self.file, error)

    def _new_here(self) -> bool:
        """Whether this host has compiled what the file lacks."""
        held: set[Path] = set()
        with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(self.file) as kept:
            held = {_entry(Path(name)) for name in kept.namelist()}
        return any(_entry(name) not in held for name in _members(self._local))

    def _copy_into(self, target: zipfile.ZipFile) -> set[Path]:
        """Write what the file holds and is whole; returns the entries."""
        held = set()
        try:
            with zipfile.ZipFile(self.file) as kept:
                for member in kept.infolist():
                    target.writestr(member, kept.read(member), zipfile.ZIP_DEFLATED, 1)
                    held.add(_entry(Path(member.filename)))
        except FileNotFoundError:
            pass
        except Exception as error:
            log.warning("%s cannot be read (%s); rewriting it", self.file, error)
        return held


def _zip(stream: IO[bytes]) -> zipfile.ZipFile:
    return zipfile.ZipFile(
        stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False
    )


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Keep others from writing `file`, where the file system knows locks."""
    with (file.parent / f".{file.name}.lock").open("w") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _members(local: Path) -> Iterator[Path]:
    """Files of a host's folder that are worth keeping and are whole, by their names in it."""
    for path in sorted(local.rglob("*")):
        name = path.relative_to(local)
        if not path.is_file() or name.parts[0] in _LEFT_OUT or path.suffix == ".tmp":
            continue
        # Another run on this host may be at it, under torch's lock.
        lock = local / "locks" / f"{path.name.partition('.')[0]}.lock"
        if lock.exists():
            held = take_lock(lock)
            if held is None:
                continue
            os.close(held)
        yield name


def _entry(name: Path) -> Path:
    """What a member is a version of: graphs of one key differ by bytes from host to host."""
    return name.parent if len(name.parts) == _GRAPH_PARTS else name


def _private_folder() -> Path:
    """Where this user's compiled code lies on this host: what is in it is run."""
    try:
        folder = Path(tempfile.gettempdir()) / f"sgt-ds-compiled-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        message = f"{error.filename} {refusal(error, 'written', instead='set another')}"
        raise UserError("TMPDIR", None, message) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UserError(
            folder, None, f"is not a private folder of this user; remove it, or set {_TORCH_FOLDER}"
        )
    return folder


def _unpack(kept: zipfile.ZipFile, folder: Path) -> None:
    """Write the entries that are not there yet, each whole or not at all; CRCs are checked."""
    for member in kept.infolist():
        path = folder / member.filename
        if (
            folder not in path.resolve().parents
            or (folder / _entry(Path(member.filename))).exists()
        ):
            continue
        content = kept.read(member)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_writer(path) as stream:
            stream.write(content)


def _compiled_here() -> int:
    """Graphs that this process has asked for: compiled, or found and then tuned on its device."""
    found = counters["inductor"]
    return found["fxgraph_cache_miss"] + found["fxgraph_cache_hit"]
