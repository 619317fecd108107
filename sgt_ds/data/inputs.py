"""Input files: patterns to a list of files, and their bytes. Remote ones are in `remote`."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

import xxhash

from sgt_ds.data.decompress import Damage
from sgt_ds.data.remote import (
    RemoteStream,
    State,
    changed_error,
    is_remote,
    remote_matches,
    remote_state,
)
from sgt_ds.errors import UserError


@dataclass(frozen=True)
class InputFile:
    """One file to read."""

    location: str
    """Path, or URL that fsspec knows."""
    name: str
    """Path below the directory that all inputs share: what manifests say."""
    bytes: int
    version: str
    """Changes when the file does, at no cost to read: time of change, or the remote's own mark."""


class HashingReader:
    """A file's bytes, counted and hashed as they are read.

    Raises, when made: Damage where the file cannot be opened or is no file. When read: OSError of
    a local file, UserError of a remote one.
    """

    def __init__(self, file: InputFile) -> None:
        self._file, self._hash = file, xxhash.xxh3_128()
        self.bytes = 0
        try:
            self._stream = _open(file)
        except OSError as error:
            reason = "not-a-file" if isinstance(error, IsADirectoryError) else "unreadable"
            raise Damage(reason, error.strerror or str(error)) from None

    def read(self, size: int) -> bytes:
        """Up to `size` bytes."""
        content = self._stream.read(size)
        self._hash.update(content)
        self.bytes += len(content)
        return content

    def hexdigest(self) -> str:
        """XXH3-128 of the whole file; reads what is left of it (no one may have wanted it)."""
        while self.read(1 << 20):
            pass
        return self._hash.hexdigest()

    def check_unchanged(self) -> None:
        """Raise UserError where the file is no longer the one that was listed."""
        now = _state_now(self._file.location)
        if now != (listed := (self._file.bytes, self._file.version)):
            raise changed_error(self._file.location, listed, now)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def expand_inputs(patterns: Sequence[str]) -> list[InputFile]:
    """Files that the patterns name: each pattern's in order of name, none twice.

    A pattern is a path, a glob (`**` too) or a URL of fsspec's (`s3://…`, `https://…`).
    Raises: UserError where a pattern names nothing, or a folder.
    """
    found: dict[str, State] = {}
    for pattern in patterns:
        matches = remote_matches(pattern) if is_remote(pattern) else _local_matches(pattern)
        if not matches:
            raise UserError(pattern, None, "no such file; check the path or the pattern")
        for location, state in matches:
            found.setdefault(location, state)
    names = _names(list(found))
    return [
        InputFile(location, names[location], size, version)
        for location, (size, version) in found.items()
    ]


def _names(locations: list[str]) -> dict[str, str]:
    parents = [PurePosixPath(location).parent for location in locations]
    try:
        root = os.path.commonpath(parents)
    except ValueError:  # relative and absolute, or local and remote
        return {location: location for location in locations}
    return {location: str(PurePosixPath(location).relative_to(root)) for location in locations}


def _local_matches(pattern: str) -> list[tuple[str, State]]:
    if Path(pattern).is_dir():
        raise UserError(
            pattern, None, f"is a folder; give a glob, e.g. '{pattern.rstrip('/')}/*.json.gz'"
        )
    # A file may be named like a pattern: the exact name wins.
    # Path.glob takes no absolute pattern.
    paths = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    matches = []
    for path in paths:
        try:
            state = Path(path).stat()
        except OSError:  # a dangling link: it is named when it is opened
            matches.append((str(Path(path).absolute()), (0, "")))
            continue
        if "**" in pattern and stat.S_ISDIR(state.st_mode):
            continue
        matches.append((os.path.realpath(path), (state.st_size, str(state.st_mtime_ns))))
    return matches


def _state_now(location: str) -> State:
    if is_remote(location):
        return remote_state(location)
    try:
        state = Path(location).stat()
    except OSError:  # gone
        return 0, ""
    return state.st_size, str(state.st_mtime_ns)


def _open(file: InputFile) -> IO[bytes] | RemoteStream:
    location = file.location
    if is_remote(location):
        return RemoteStream(location, (file.bytes, file.version))
    # A named pipe would block forever.
    if not stat.S_ISREG(Path(location).stat().st_mode):
        raise IsADirectoryError("is a directory or a device, not a file")
    return Path(location).open("rb")
