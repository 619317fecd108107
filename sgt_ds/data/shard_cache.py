"""Shards of a remote prepared set on a local disk: fetched once, checked at every start.

Knows names and checksums of a manifest, no tokens and no order. Processes of one host share a
directory; each file is fetched, and read to be checked, by one of them.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import xxhash

from sgt_ds.data.cache_limit import alone, hold, note_use, note_whole, whole_at
from sgt_ds.data.manifest import NAME, Manifest, ShardEntry, read_manifest
from sgt_ds.data.remote import RemoteStream, remote_state, without_secrets
from sgt_ds.errors import UserError, refusal
from sgt_ds.files import atomic_writer

log = logging.getLogger(__name__)

# Files that are fetched or checked at a time, ahead of need.
FETCHES = 8
PIECE_BYTES = 1 << 20
DAMAGED = "%s: checksum mismatch; fetching it again"


class _Hash(Protocol):
    def update(self, content: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


class ShardCache:
    """The local copy of one remote set, in a directory named by its manifest's content.

    A set that was prepared again under the same address is another set, and gets another directory.
    Raises: UserError where `location` holds no finished set or cannot be reached.
    """

    def __init__(self, location: str, cache_dir: Path | None) -> None:
        self._location = location.rstrip("/")
        self.name = without_secrets(self._location)
        content = self._manifest_bytes()
        self.directory = cache_root(cache_dir) / hashlib.sha256(content).hexdigest()[:32]
        self._opened = time.time()
        self._whole: set[str] = set()
        with self._writing():
            hold(self.directory, self)
            with alone(self.directory, NAME):
                if not self._holds(NAME, content):
                    with atomic_writer(self.directory / NAME) as stream:
                        stream.write(content)
        self.manifest: Manifest = read_manifest(self.directory)
        tokenizer = self.manifest.tokenizer
        self._fetch(tokenizer.file, None, tokenizer.sha256, hashlib.sha256)
        self._lock = threading.Lock()
        self._fetches: dict[str, Future[None]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def fetch(self, shard: ShardEntry) -> None:
        """Wait until a shard is in `directory`, whole.

        One that was there before is read once after the set was opened, by one process of the host,
        and fetched again where its checksum differs.
        Raises: UserError where it cannot be fetched or is not the one that the manifest names.
        """
        if self._is_here(shard):
            return
        with self._lock:
            running = self._fetches.get(shard.file)
        # One that waits in the queue is needed now: it goes before the others.
        if running is None or running.cancel():
            self._fetch(shard.file, shard.bytes, shard.xxh3_128, xxhash.xxh3_128)
        else:
            running.result()

    def fetch_ahead(self, shards: Sequence[ShardEntry]) -> None:
        """Fetch and check shards in the background, in order. What fails is told when needed."""
        note_use(self.directory)
        with self._lock:
            for shard in shards:
                if shard.file in self._fetches or self._is_here(shard):
                    continue
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(FETCHES, thread_name_prefix="shard-fetch")
                job = (shard.file, shard.bytes, shard.xxh3_128, xxhash.xxh3_128)
                self._fetches[shard.file] = self._pool.submit(self._fetch, *job)

    def close(self) -> None:
        """Begin no further fetch; wait for those in progress. The cache may be used again."""
        with self._lock:
            pool, self._pool, self._fetches = self._pool, None, {}
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def _manifest_bytes(self) -> bytes:
        address = f"{self._location}/{NAME}"
        try:
            stream = RemoteStream(address, remote_state(address))
            content = b"".join(iter(lambda: stream.read(PIECE_BYTES), b""))
        except FileNotFoundError:
            raise UserError(
                self.name,
                None,
                f"is not a prepared set (no {NAME}); give the output of `sgt-ds data prepare`",
            ) from None
        stream.close()
        return content

    def _holds(self, name: str, content: bytes) -> bool:
        path = self.directory / name
        if not path.exists():
            return False
        if path.read_bytes() != content:
            log.warning(DAMAGED, path)
            return False
        return True

    def _is_here(self, shard: ShardEntry) -> bool:
        return shard.file in self._whole and (self.directory / shard.file).exists()

    def _fetch(
        self, name: str, size: int | None, digest: str, new_hash: Callable[[], _Hash]
    ) -> None:
        if Path(name).name != name or name.startswith("."):
            raise UserError(f"{self.name}/{NAME}", "file", f"'{name}' is not a plain file name")
        target = self.directory / name
        with self._writing(), alone(self.directory, name) as lock:
            if target.exists():
                # Found whole, or fetched, by another process since this one opened the set?
                if whole_at(lock) < self._opened and not _matches(target, digest, new_hash()):
                    log.warning(DAMAGED, target)
                    self._download(target, size, digest, new_hash())
            else:
                self._download(target, size, digest, new_hash())
            note_whole(lock)
        self._whole.add(name)

    def _download(self, target: Path, size: int | None, digest: str, hasher: _Hash) -> None:
        address, shown = f"{self._location}/{target.name}", f"{self.name}/{target.name}"
        received = 0
        try:
            stream = RemoteStream(address, remote_state(address))
        except FileNotFoundError:
            raise UserError(shown, None, "is missing; fetch or prepare the set again") from None
        with atomic_writer(target) as output:
            while piece := stream.read(PIECE_BYTES):
                hasher.update(piece)
                output.write(piece)
                received += len(piece)
            stream.close()
            if hasher.hexdigest() != digest:
                sizes = "" if size in (None, received) else f" ({received} bytes of {size})"
                raise UserError(
                    shown,
                    None,
                    f"does not match {NAME}{sizes}: its checksum differs; copy the set to the "
                    "store again",
                )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = getattr(self, "directory", "data.cache_dir")
            raise UserError(where, "data.cache_dir", _cache_refusal(error)) from None


def _cache_refusal(error: OSError) -> str:
    instead = "name another directory"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        instead += ", or set data.cache_bytes so that sets not in use are evicted"
    return refusal(error, "written", instead=instead)


def cache_root(cache_dir: Path | None) -> Path:
    """`data.cache_dir`, or where remote sets are kept without it."""
    return _default_directory() if cache_dir is None else cache_dir


def _matches(path: Path, digest: str, hasher: _Hash) -> bool:
    """Whether a file is what it was when it was fetched. One that cannot be read is not."""
    try:
        with path.open("rb") as stream:
            while piece := stream.read(PIECE_BYTES):
                hasher.update(piece)
    except OSError:
        return False
    return hasher.hexdigest() == digest


def _default_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sgt-ds"
