"""Shards of a remote prepared set, kept on a local disk: fetched once, checked, whole or absent.

Knows names and checksums of a manifest, no tokens and no order. Processes of one host share a
directory; each file is fetched by one of them. Nothing is ever removed here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

import xxhash

from sgt_ds.data.manifest import NAME, Manifest, ShardEntry, read_manifest
from sgt_ds.data.remote import RemoteStream, remote_state
from sgt_ds.errors import UserError
from sgt_ds.files import atomic_writer

# Files that are fetched at a time, ahead of need.
FETCHES = 8
PIECE_BYTES = 1 << 20


class _Hash(Protocol):
    def update(self, content: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


class ShardCache:
    """The local copy of one remote set, in a directory named by its manifest's content.

    A set that was prepared anew under the same address is another set, and gets another directory.
    Raises: UserError where `location` holds no finished set or cannot be reached.
    """

    def __init__(self, location: str, cache_dir: Path | None) -> None:
        self._location = location.rstrip("/")
        self.name = _without_secrets(self._location)
        content = self._manifest_bytes()
        root = _default_directory() if cache_dir is None else cache_dir
        self.directory = root / hashlib.sha256(content).hexdigest()[:32]
        with self._writing():
            self.directory.mkdir(parents=True, exist_ok=True)
            if not (self.directory / NAME).exists():
                with _alone(self.directory, NAME), atomic_writer(self.directory / NAME) as stream:
                    stream.write(content)
        self.manifest: Manifest = read_manifest(self.directory)
        tokenizer = self.manifest.tokenizer
        self._fetch(tokenizer.file, None, tokenizer.sha256, hashlib.sha256)
        self._lock = threading.Lock()
        self._fetches: dict[str, Future[None]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def fetch(self, shard: ShardEntry) -> None:
        """Wait until a shard lies in `directory`.

        Raises: UserError where it cannot be fetched or is not the one that the manifest names.
        """
        if (self.directory / shard.file).exists():
            return
        with self._lock:
            running = self._fetches.get(shard.file)
        # One that waits in the queue is needed now: it goes before the others.
        if running is None or running.cancel():
            self._fetch(shard.file, shard.bytes, shard.xxh3_128, xxhash.xxh3_128)
        else:
            running.result()

    def fetch_ahead(self, shards: Sequence[ShardEntry]) -> None:
        """Fetch shards in the background, in that order. What fails is told when it is needed."""
        with self._lock:
            for shard in shards:
                if shard.file in self._fetches or (self.directory / shard.file).exists():
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
                f"is no prepared set (no {NAME}); give what `sgt-ds data prepare` wrote",
            ) from None
        stream.close()
        return content

    def _fetch(
        self, name: str, size: int | None, digest: str, new_hash: Callable[[], _Hash]
    ) -> None:
        if Path(name).name != name or name.startswith("."):
            raise UserError(f"{self.name}/{NAME}", "file", f"'{name}' is no plain file name")
        target = self.directory / name
        if target.exists():
            return
        address, shown = f"{self._location}/{name}", f"{self.name}/{name}"
        with self._writing(), _alone(self.directory, name):
            if target.exists():  # another process fetched it meanwhile
                return
            hasher, received = new_hash(), 0
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
                        f"is not the file that {NAME} names{sizes}: its checksum differs; copy the "
                        "set to the store again",
                    )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = getattr(self, "directory", "data.cache_dir")
            raise UserError(
                where,
                "data.cache_dir",
                f"cannot be written ({error.strerror or error}); name a directory with enough room",
            ) from None


@contextmanager
def _alone(directory: Path, name: str) -> Iterator[None]:
    """Hold a file's lock: of all processes and threads that share the cache, one fetches it.

    The system lets go of a lock whose holder died.
    """
    descriptor = os.open(directory / f".{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _default_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sgt-ds"


def _without_secrets(location: str) -> str:
    """The address as logs and metrics may show it: no user, no password, no query."""
    parts = urlsplit(location)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
