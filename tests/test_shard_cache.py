"""Remote prepared sets: fetched once, checked against the manifest, ahead of need."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from token_sets import numbered_set

from sgt_ds.config import DataConfig, DataSource, EvaluationConfig, ModelConfig, TextSource
from sgt_ds.data import Loader, check_data, open_token_set
from sgt_ds.errors import UserError

LENGTH = 8
SHARDS = 12
MODEL = ModelConfig(
    hidden_size=64, intermediate_size=64, num_layers=1, num_heads=1, vocab_size=1 << 20
)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return numbered_set(tmp_path / "store" / "set", [6] * SHARDS, LENGTH)


def read_all(location: str, cache_dir: Path) -> list[int]:
    token_set = open_token_set(location, cache_dir)
    rows = token_set.read(np.arange(token_set.num_sequences(LENGTH)), LENGTH)
    found: list[int] = rows[:, 1].tolist()
    return found


def read_all_and_say(location: str, cache_dir: Path) -> tuple[list[int], list[str]]:
    """What was read, and what the operator was told."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("sgt_ds")
    log.addHandler(handler)
    try:
        return read_all(location, cache_dir), told
    finally:
        log.removeHandler(handler)


def hold_open(location: str, cache_dir: Path, opened: Any) -> None:
    token_set = open_token_set(location, cache_dir)
    opened.set()
    signal.pause()
    token_set.close()


class Store(ThreadingHTTPServer):
    """A web server that counts what is fetched, and waits before each shard."""

    delay_seconds = 0.0

    def __init__(self, root: Path) -> None:
        self.fetched: Counter[str] = Counter()
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(root)))


class _Handler(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.endswith(".tokens"):
            self.server.fetched[self.path] += 1  # type: ignore[attr-defined]
            time.sleep(self.server.delay_seconds)  # type: ignore[attr-defined]
        super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def store(stored: Path) -> Iterator[Store]:
    pytest.importorskip("aiohttp")
    with Store(stored.parent) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_address_becomes_a_path() -> None:
    source = DataSource(path="s3://bucket/c4")
    assert source.path == "s3://bucket/c4"
    assert DataSource(path="shards/c4").path == Path("shards/c4")
    assert DataConfig(train=[source], validation="https://a/b").validation == "https://a/b"


def test_a_cached_set_differs_or_is_fetched_by_each_process(stored: Path, tmp_path: Path) -> None:
    address = stored.as_uri()
    with get_context("spawn").Pool(4) as pool:
        answers = pool.starmap(read_all, [(address, tmp_path / "cache")] * 4)
    assert answers == [list(range(6 * SHARDS))] * 4
    (copy,) = (tmp_path / "cache").iterdir()
    for file in stored.iterdir():
        assert (copy / file.name).read_bytes() == file.read_bytes()
    assert not list(copy.glob("*.tmp"))
    # What lies there is used: the store may be gone, but for the manifest.
    for file in stored.glob("*.tokens"):
        file.unlink()
    assert read_all(address, tmp_path / "cache") == list(range(6 * SHARDS))


def test_a_set_prepared_anew_under_the_same_address_is_read_from_the_old_copy(
    tmp_path: Path,
) -> None:
    first = numbered_set(tmp_path / "store", [6], LENGTH)
    assert read_all(first.as_uri(), tmp_path / "cache")[0] == 0
    first.rename(tmp_path / "old")
    second = numbered_set(tmp_path / "store", [6], LENGTH, first=100)
    assert read_all(second.as_uri(), tmp_path / "cache")[0] == 100


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_a_damaged_download_is_kept(stored: Path, tmp_path: Path, damage: str) -> None:
    shard = stored / "00003-000.tokens"
    content = bytearray(shard.read_bytes())
    content[-20] ^= 1
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(content if damage == "flipped" else content[:-40])
    for _ in range(2):
        with pytest.raises(UserError, match=r"00003-000\.tokens: (does not match|is missing)"):
            read_all(stored.as_uri(), tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*/00003-000.tokens"))
    assert not list(tmp_path.glob("cache/*/.*.tmp"))


def test_no_set_at_an_address_is_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a prepared set"):
        open_token_set((tmp_path / "nothing").as_uri(), tmp_path / "cache")
    with pytest.raises(UserError, match="not supported"):
        open_token_set("nonsense://nothing", tmp_path / "cache")


def test_shards_are_fetched_twice_or_one_after_another_or_waits_are_not_counted(
    store: Store, tmp_path: Path
) -> None:
    store.delay_seconds = 0.3
    source = DataSource(path=f"http://user:secret@127.0.0.1:{store.server_port}/set")
    batch = 6 * SHARDS  # all shards, at once
    with Loader(
        [source], LENGTH, batch, batch, 0, 1, 0, cache_dir=tmp_path / "cache", pin_memory=False
    ) as loader:
        started = time.monotonic()
        (rows,) = loader.next_step()
        seconds = time.monotonic() - started
        assert sorted(rows.tokens[:, 1].tolist()) == list(range(batch))
        assert 0.3 <= loader.wait_seconds <= seconds
        assert seconds < 0.3 * SHARDS / 2
        assert list(loader.source_tokens) == [f"http://127.0.0.1:{store.server_port}/set"]
        time.sleep(0.5)  # the next batch is read meanwhile
        before = loader.wait_seconds
        list(loader.next_step())
        assert loader.wait_seconds - before < 0.1
    # One request for its bytes; fsspec may ask for its size by another.
    assert max(store.fetched.values()) <= 2
    assert len(store.fetched) == SHARDS


@pytest.fixture(params=["s3", "gs"])
def bucket(stored: Path, request: pytest.FixtureRequest) -> str:
    """The set in a bucket of S3, or of Google's."""
    store: Any = request.getfixturevalue("s3" if request.param == "s3" else "gcs")
    for path in stored.iterdir():
        if request.param == "s3":
            store.upload_file(str(path), "shelf", f"c4/{path.name}")
        else:
            store.put_file(str(path), f"shelf/c4/{path.name}")
    return f"{request.param}://shelf/c4"


def test_a_copy_that_rots_in_the_cache_is_trained_on(
    bucket: str, stored: Path, tmp_path: Path
) -> None:
    address, cache = bucket, tmp_path / "cache"
    read_all(address, cache)
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    names = ("manifest.json", "tokenizer.json", "00003-000.tokens", "00007-000.tokens")
    for name in names:
        before = (folder / name).stat()
        content = bytearray((folder / name).read_bytes())
        content[-1] ^= 1
        (folder / name).write_bytes(content)
        os.utime(folder / name, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a disk rots
    with get_context("spawn").Pool(3) as pool:
        answers = pool.starmap(read_all_and_say, [(address, cache)] * 3)
    assert [rows for rows, _ in answers] == [list(range(6 * SHARDS))] * 3
    assert Counter(line for _, told in answers for line in told) == {
        f"{folder / name}: checksum mismatch; fetching it again": 1 for name in names
    }
    for name in names:
        assert (folder / name).read_bytes() == (stored / name).read_bytes()


def test_the_cache_outgrows_its_limit_or_loses_what_a_run_reads_or_used_last(
    tmp_path: Path,
) -> None:
    cache = tmp_path / "cache"
    made = [
        numbered_set(tmp_path / name / "set", [600] * 4, LENGTH, first)
        for first, name in enumerate(("read", "old", "recent", "new"))
    ]
    read, old, recent, new = (path.as_uri() for path in made)
    size = sum(path.stat().st_size for path in made[0].glob("*.tokens"))
    folder = {address: open_token_set(address, cache).path for address in (read, old, recent)}

    def start(limit: int, *texts: str) -> None:
        """What a run that trains on `new`, and is scored on `texts`, does first."""
        scored = [TextSource(name=str(place), path=text) for place, text in enumerate(texts)]
        data = DataConfig(
            train=[DataSource(path=new)],
            sequence_length=LENGTH,
            cache_dir=cache,
            cache_bytes=limit,
        )
        check_data(data, MODEL, EvaluationConfig(perplexity=scored))

    context = get_context("spawn")
    opened = context.Event()
    reader = context.Process(target=hold_open, args=(read, cache, opened))
    reader.start()
    try:
        for address in (read, old):
            read_all(address, cache)
        open_token_set(old, cache).sequence(0, LENGTH)  # its first shard is the one used last
        read_all(recent, cache)
        assert opened.wait(60)
        start(4 * size - size // 2)
        names = {path.name for path in folder[old].glob("*.tokens")}
        assert "00000-000.tokens" in names
        assert len(names) < 3
        for address in (read, recent):
            assert len(list(folder[address].glob("*.tokens"))) == 4
        start(2 * size)
        assert not folder[old].exists()
        assert not folder[recent].exists()
        assert len(list(folder[read].glob("*.tokens"))) == 4
    finally:
        reader.kill()  # no word from it: the system lets go
        reader.join()
    start(size)
    assert not folder[read].exists()
    assert read_all(new, cache) == list(range(3, 3 + 600 * 4))
    for address in (old, recent):  # the one that texts are read from was used less lately
        read_all(address, cache)
    start(2 * size, old, "https://nowhere.invalid/texts.jsonl")
    assert len(list(folder[old].glob("*.tokens"))) == 4
    assert not folder[recent].exists()
    with pytest.raises(UserError, match=f"cache_bytes: .* set {2 * size} or more"):
        start(2 * size - 1, old)
    with pytest.raises(UserError, match=f"cache_bytes: .* set {size} or more"):
        start(size - 1)
