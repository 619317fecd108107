"""Parts of a package's source distribution that its wheel leaves out. Nothing of it is built."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
from pip_fetches import pip_or_skip


def source_of(package: str, version: str, parts: tuple[str, ...], config: pytest.Config) -> Path:
    """The unpacked folder, with what has one of `parts` in its path; fetched once a checkout.

    Skips the test where no package index can be reached.
    """
    folder = _folder(f"{package}-{version}", config)
    name = f"{package.replace('-', '_')}-{version}"
    unpacked = folder / name
    if unpacked.is_dir():
        return unpacked
    # Of its own: another process may be at the same.
    with tempfile.TemporaryDirectory(dir=folder) as place:
        # Only this package as source: what pip asks for its version comes as wheels.
        fetch = ["download", "--quiet", "--no-deps", "--no-binary", package]
        fetch += [f"{package}=={version}", "-d", place]
        pip_or_skip(fetch, f"the source of {package} {version}")
        part = _unpack(Path(place) / f"{name}.tar.gz", parts) / name
        try:
            part.rename(unpacked)
        except OSError:  # the other was first
            if not unpacked.is_dir():
                raise
    return unpacked


def _folder(name: str, config: pytest.Config) -> Path:
    """What pytest keeps between runs; or one for this run, where it is told to keep nothing."""
    cache = getattr(config, "cache", None)
    if cache is not None:
        return Path(cache.mkdir(name))
    folder = tempfile.mkdtemp(prefix=name)
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    return Path(folder)


def _unpack(archive: Path, parts: tuple[str, ...]) -> Path:
    """The folder beside the archive that holds what has one of `parts` in its path."""
    with tarfile.open(archive) as packed:
        found = {part: [m for m in packed.getmembers() if part in m.name] for part in parts}
        lacking = [part for part, members in found.items() if not members]
        if lacking:
            pytest.fail(f"nothing in {archive.name} has {' or '.join(lacking)} in its path")
        inside = list({member.name: member for each in found.values() for member in each}.values())
        # Releases before 3.11.4 know no filter.
        safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        packed.extractall(archive.parent / "part", members=inside, **safe)
    return archive.parent / "part"
