"""What torch compiled, kept for the next start. Knows no model and no step.

torch keeps what it compiled in a folder of each host, which a new machine or container does not
have, and which hosts must not share. A kept file holds all of it, whole or absent, for all hosts.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import stat
import tempfile
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from sgt_ds.errors import UserError
from sgt_ds.files import atomic_writer
from sgt_ds.training.engine import Ranks

log = logging.getLogger("sgt_ds")

_TORCH_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
# Triton's kernels lie in torch's graphs as well.
_LEFT_OUT = frozenset({"locks", "triton"})


class CompileCache:
    """One file of all that was compiled, for one version of torch and one kind of device."""

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
        """Let torch compile into a folder of this cache's own, with what the file holds in it.

        One rank of each host unpacks. Collective. Raises: UserError where there is no such folder.
        """
        own = hashlib.sha256(str(self.file.resolve()).encode()).hexdigest()[:16]
        local = Path(os.environ.setdefault(_TORCH_FOLDER, str(_private_folder() / own)))
        local = local.resolve()
        if self._ranks.local_rank == 0:
            try:
                with zipfile.ZipFile(self.file) as kept:
                    _unpack(kept, local)
                self._kept = _compiled_here()
            except FileNotFoundError:
                pass
            except Exception as error:  # zipfile raises a dozen kinds where bits have turned
                log.warning("%s cannot be read (%s); compiling anew", self.file, error)
        dist.barrier(group=self._ranks.host_group)

    def keep(self) -> None:
        """Write the file where this process has compiled anything since it was last written.

        While no rank compiles: one that does would leave half a file.
        """
        compiled = _compiled_here()
        if not self._ranks.is_main or compiled == self._kept:
            return
        local = Path(os.environ[_TORCH_FOLDER])
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with (
                atomic_writer(self.file) as stream,
                zipfile.ZipFile(
                    stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False
                ) as kept,
            ):
                for path in sorted(local.rglob("*")):
                    name = path.relative_to(local)
                    if path.is_file() and name.parts[0] not in _LEFT_OUT and path.suffix != ".tmp":
                        kept.write(path, name)
        except (OSError, ValueError) as error:  # costs time at the next start, and nothing else
            log.warning("%s cannot be written (%s)", self.file, error)
        self._kept = compiled


def _private_folder() -> Path:
    """Where this user's compiled code lies on this host: what is in it is run."""
    try:
        folder = Path(tempfile.gettempdir()) / f"sgt-ds-compiled-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise UserError("TMPDIR", None, f"cannot be written ({error}); set another") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UserError(
            folder, None, f"is not this user's alone; remove it, or set {_TORCH_FOLDER}"
        )
    return folder


def _unpack(kept: zipfile.ZipFile, folder: Path) -> None:
    """Write the members that are not there yet, each whole or not at all; their CRCs are checked."""
    for member in kept.infolist():
        path = folder / member.filename
        if folder not in path.resolve().parents or path.exists():
            continue
        content = kept.read(member)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_writer(path) as stream:
            stream.write(content)


def _compiled_here() -> int:
    return counters["inductor"]["fxgraph_cache_miss"]
