"""Parts of a package's source distribution that its wheel leaves out. Nothing of it is built."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest


def source_of(package: str, version: str, parts: tuple[str, ...], config: pytest.Config) -> Path:
    """The unpacked folder, with what has one of `parts` in its path; fetched once a checkout.

    Skips the test where pip cannot fetch it.
    """
    folder = Path(config.cache.mkdir(f"{package}-{version}"))
    name = f"{package.replace('-', '_')}-{version}"
    unpacked = folder / name
    if unpacked.is_dir():
        return unpacked
    # Only this package as source: what pip asks for its version comes as wheels.
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    fetch += ["--no-binary", package, f"{package}=={version}", "-d", str(folder)]
    done = subprocess.run(fetch, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        pytest.skip(f"pip cannot fetch the source of {package} {version}: {said}")
    archive = folder / f"{name}.tar.gz"
    with tarfile.open(archive) as packed:
        inside = [m for m in packed.getmembers() if any(part in m.name for part in parts)]
        # Releases before 3.11.4 know no filter.
        safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        packed.extractall(folder / "part", members=inside, **safe)
    (folder / "part" / name).rename(unpacked)
    archive.unlink()
    return unpacked
