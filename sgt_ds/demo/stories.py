"""A seeded generator of short English stories, and C4 shards of them. Knows no tokenizer.

Story i of a seed is a pure function of (seed, i). Each is told from a small world, so that what
is introduced early (names, pronouns, owners, spots, promises, causes) agrees later: a model that
attends far back predicts it, one that does not must guess.
"""

from __future__ import annotations

import datetime
import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import zstandard

from sgt_ds.demo import plots_people, plots_things
from sgt_ds.demo.scenes import closing, interludes, opening
from sgt_ds.demo.world import World
from sgt_ds.files import atomic_writer

PLOTS = (
    plots_things.left_behind,
    plots_things.rescue,
    plots_things.hidden_present,
    plots_things.thief,
    plots_things.swap,
    plots_people.promise,
    plots_people.message,
    plots_people.errand,
    plots_people.bet,
    plots_people.lesson,
    plots_people.riddle,
    plots_people.warning,
)
TRAIN_SHARDS = 4
VALIDATION_SHARE = 0.05
# Stories of the validation shard; a training set never gets there.
VALIDATION_START = 10**9
_EPOCH = datetime.datetime(2019, 4, 18, tzinfo=datetime.timezone.utc)


def tell_story(seed: int, number: int) -> str:
    """The text of story `number`: paragraphs parted by a line break, about 1,200 characters."""
    rng = random.Random(f"{seed}/{number}")
    world = World(rng)
    threads = [plot(world) for plot in rng.sample(PLOTS, 1 + (rng.random() < 0.7))]
    paragraphs = [opening(world)]
    small = interludes(world, rng.randint(1, 3))
    while threads:
        thread = rng.choice(threads)
        stage = next(thread, None)
        if stage is None:
            threads.remove(thread)
            continue
        paragraphs.append(" ".join(stage))
        if small and rng.random() < 0.6:
            paragraphs.append(small.pop())
    paragraphs.append(closing(world))
    return "\n".join(paragraphs)


def documents(seed: int, start: int = 0) -> Iterator[dict[str, str]]:
    """Endless rows in C4's schema: `text`, `timestamp`, `url`."""
    number = start
    while True:
        text = tell_story(seed, number)
        moment = _EPOCH + datetime.timedelta(minutes=(number * 7919) % 525_600)
        yield {
            "text": text,
            "timestamp": moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "url": f"https://stories.example/{seed}/{number}",
        }
        number += 1


def write_corpus(out_dir: Path, seed: int, size_bytes: int) -> list[Path]:
    """Write training shards and one validation shard, byte for byte the same for a seed.

    `size_bytes`: bytes of training text (UTF-8, before compression), reached by the last story;
    the validation shard holds a twentieth more, from stories of its own.
    Returns the files: `train.0000i-of-00004.json.gz` and `.json.zst`, `validation.00000-of-00001.
    json.gz`. Each appears whole or not at all. Raises: OSError.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    rows = documents(seed)
    written = []
    for shard in range(TRAIN_SHARDS):
        suffix = "zst" if shard % 2 else "gz"
        path = out_dir / f"train.{shard:05d}-of-{TRAIN_SHARDS:05d}.json.{suffix}"
        _write_shard(path, rows, size_bytes // TRAIN_SHARDS)
        written.append(path)
    path = out_dir / "validation.00000-of-00001.json.gz"
    _write_shard(path, documents(seed, VALIDATION_START), int(size_bytes * VALIDATION_SHARE))
    return [*written, path]


def _write_shard(path: Path, rows: Iterator[dict[str, str]], size_bytes: int) -> None:
    with atomic_writer(path) as stream, _compressor(path, stream) as out:
        size = 0
        while size < size_bytes:
            row = next(rows)
            size += len(row["text"].encode())
            out.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")


def _compressor(path: Path, stream: IO[bytes]) -> Any:
    if path.suffix == ".zst":
        return zstandard.ZstdCompressor(level=3).stream_writer(stream, closefd=False)
    # No name and no time in the header: the bytes depend on the text alone.
    return gzip.GzipFile(filename="", mode="wb", fileobj=stream, compresslevel=6, mtime=0)
