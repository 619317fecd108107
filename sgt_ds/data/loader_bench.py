"""`bench data`: loader speed on this machine, compared with bare copies of the same rows.

Knows loader, permutation and sets, which it makes itself in a temporary directory; no tokenizer.
Each case and what it is held against are timed in turn, several rounds, so that a busy machine
slows both.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from sgt_ds.config import DataSource
from sgt_ds.data.loader import Loader
from sgt_ds.data.manifest import Manifest, Settings, ShardEntry, TokenizerEntry, write_manifest
from sgt_ds.data.permutation import Permutation
from sgt_ds.data.preparation import SHARD_TOKENS
from sgt_ds.data.shards import Shard, write_shard

VOCABULARY = 50280
LENGTHS = (4096, 256)
BATCH_TOKENS = 1 << 20
BATCHES = 16
DOCUMENT_TOKENS = 427
"""Mean of C4 en."""
SHARD_COUNT = 8
MANY_SHARDS_TOKENS = 600
PERMUTED_SIZE = 10**11 // 4096
PERMUTED_INDICES = 1_000_000

_OPEN = """
import json, sys, time
from pathlib import Path
import numpy as np
from sgt_ds.data import open_token_set
from sgt_ds.memory import peak_resident_bytes
before = peak_resident_bytes()
path = Path(sys.argv[1])
started = time.perf_counter()
json.loads((path / "manifest.json").read_bytes())
bare = time.perf_counter() - started
started, cpu = time.perf_counter(), time.process_time()
token_set = open_token_set(path)
count = token_set.num_sequences(int(sys.argv[2]))
opened, cpu = time.perf_counter() - started, time.process_time() - cpu
after = peak_resident_bytes()
started = time.perf_counter()
for first in range(0, count, 100):
    token_set.read(np.arange(first, min(first + 100, count)), int(sys.argv[2]))
print(json.dumps({"seconds": opened, "cpu_seconds": cpu, "json_seconds": bare, "memory_bytes": after - before,
    "process_memory_bytes": after, "read_each_shard_seconds": time.perf_counter() - started}))
"""


@dataclass(frozen=True)
class LoaderRow:
    """One way of loading. Medians over the rounds."""

    sequence_length: int
    document_starts: bool
    tokens_per_second: float
    """On the clock: with the reading thread on one core and its taker on another."""
    tokens_per_cpu_second: float
    bare_tokens_per_cpu_second: float
    """Copying the same rows to int64, in the same order, from mapped files."""
    ratio: float
    """CPU time of the bare copy by the loader's, by round."""


@dataclass(frozen=True)
class DataBench:
    """What was measured."""

    tokens: int
    rounds: int
    ranks: int
    """Of the run of which one rank's share is loaded."""
    loader: list[LoaderRow]
    permutation_indices_per_cpu_second: float
    permutation_ratio: float
    """CPU time beside numpy's shuffled table of as many indices, which has to be kept."""
    opening: dict[str, float]
    """Of a set of `shards` shards in a fresh process: seconds, bytes; json_seconds parses its
    manifest and does no more."""

    def as_json(self) -> dict[str, Any]:
        """The figures as plain values."""
        return asdict(self)


def bench_data(
    *, tokens: int = 1 << 25, shards: int = 10_000, rounds: int = 5, ranks: int = 1
) -> DataBench:
    """Measure on this machine, from one process. Needs about 2 bytes a token of temporary disk.

    `ranks`: of the run of which this process loads one rank's share, up to 256.
    """
    with tempfile.TemporaryDirectory(prefix="sgt-bench-") as folder:
        directory = Path(folder)
        data = _write_set(directory / "large", tokens)
        loaded = [
            _loader_row(data, length, starts, rounds, ranks)
            for length in LENGTHS
            for starts in (False, True)
        ]
        many = _write_many(directory / "many", shards)
        length = MANY_SHARDS_TOKENS - 1
        answer = subprocess.run(
            [sys.executable, "-c", _OPEN, str(many), str(length)],
            capture_output=True,
            text=True,
            check=True,
        )
    opening = {"shards": shards, **json.loads(answer.stdout)}
    return DataBench(tokens, rounds, ranks, loaded, *_permutation(rounds), opening)


def _loader_row(data: Path, length: int, starts: bool, rounds: int, ranks: int) -> LoaderRow:
    sequences = BATCH_TOKENS // length
    micro_batch = max(1, min(8 * 4096 // length, sequences // ranks))
    sequences -= sequences % (micro_batch * ranks)
    batches = BATCHES * ranks  # as many tokens at every number of ranks
    source = [DataSource(path=data)]
    own: list[tuple[float, float]] = []
    bare: list[tuple[float, float]] = []
    with Loader(
        source, length, sequences, micro_batch, 0, ranks, 0, document_starts=starts
    ) as loader:
        token_set = loader.token_sets[0]
        mapped = [token_set.shard(place).tokens for place in range(SHARD_COUNT)]
        each = token_set.num_sequences(length) // SHARD_COUNT

        def load() -> None:
            loader.seek(0)  # nothing read ahead counts
            for _ in range(batches):
                for _micro_batch in loader.next_step():
                    pass
            loader.close()

        def copy() -> None:
            for batch in range(batches):
                _, order = loader.order.locate(loader.batch_rows(batch).reshape(-1))
                rows = np.empty((micro_batch, length + 1), dtype=np.int64)
                for number, sequence in enumerate(order.tolist()):
                    shard, place = divmod(sequence, each)
                    begin = place * length
                    rows[number % micro_batch] = mapped[shard][begin : begin + length + 1]

        load()
        for _ in range(rounds):
            own.append(_timed(load))
            bare.append(_timed(copy))
    done = BATCHES * sequences * length  # this rank's share of them all
    return LoaderRow(
        length,
        starts,
        done / statistics.median(clock for clock, _ in own),
        done / statistics.median(cpu for _, cpu in own),
        done / statistics.median(cpu for _, cpu in bare),
        statistics.median(other / one for (_, one), (_, other) in zip(own, bare, strict=True)),
    )


def _permutation(rounds: int) -> tuple[float, float]:
    permutation, indices = Permutation(PERMUTED_SIZE, 1), np.arange(PERMUTED_INDICES)
    generator = np.random.default_rng(0)
    own = [_timed(lambda: permutation(indices))[1] for _ in range(rounds)]
    table = [_timed(lambda: generator.permutation(PERMUTED_INDICES))[1] for _ in range(rounds)]
    ratios = [other / one for one, other in zip(own, table, strict=True)]
    return PERMUTED_INDICES / statistics.median(own), statistics.median(ratios)


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the clock, and of this process's CPU time."""
    clock, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - cpu


def _write_set(directory: Path, tokens: int) -> Path:
    """Random tokens in documents of random lengths, in shards alike in size."""
    directory.mkdir()
    generator = np.random.default_rng(0)
    # Room for the same number of sequences of either length in each shard.
    size = tokens // SHARD_COUNT // max(LENGTHS) * max(LENGTHS) + 1
    paths = []
    for number in range(SHARD_COUNT):
        path = directory / f"{number:05d}-000.tokens"
        values = generator.integers(0, VOCABULARY, size, dtype=np.uint16)
        borders = np.flatnonzero(generator.random(size) < 1 / DOCUMENT_TOKENS)
        with write_shard(path, VOCABULARY, _sha256()) as writer:
            for document in np.split(values, borders):
                writer.add(document)
        paths.append(path)
    _finish(directory, paths, [xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in paths])
    return directory


def _write_many(directory: Path, count: int) -> Path:
    """Small shards, all alike."""
    directory.mkdir()
    first = directory / f"{0:05d}-000.tokens"
    with write_shard(first, VOCABULARY, _sha256()) as writer:
        writer.add(np.arange(MANY_SHARDS_TOKENS))
    content = first.read_bytes()
    paths = [directory / f"{number:05d}-000.tokens" for number in range(count)]
    for path in paths[1:]:
        path.write_bytes(content)
    _finish(directory, paths, [xxhash.xxh3_128_hexdigest(content)] * count)
    return directory


def _sha256() -> str:
    return hashlib.sha256(b"{}").hexdigest()


def _finish(directory: Path, paths: Sequence[Path], digests: Sequence[str]) -> None:
    (directory / "tokenizer.json").write_bytes(b"{}")
    header = Shard(paths[0]).header
    headers = [header if len(paths) > SHARD_COUNT else Shard(path).header for path in paths]
    entries = [
        ShardEntry(
            file=path.name,
            source=f"made-{path.stem}.json.gz",
            tokens=own.tokens,
            documents=own.documents,
            bytes=own.file_bytes,
            xxh3_128=digest,
        )
        for path, own, digest in zip(paths, headers, digests, strict=True)
    ]
    manifest = Manifest(
        dtype="uint16",
        tokens=sum(entry.tokens for entry in entries),
        documents=sum(entry.documents for entry in entries),
        characters=0,
        tokenizer=TokenizerEntry(
            file="tokenizer.json",
            kind="huggingface",
            sha256=_sha256(),
            vocab_size=VOCABULARY,
            eos_id=0,
            bos_id=None,
            pad_id=None,
        ),
        settings=Settings(
            bos=False,
            special_tokens=False,
            max_document_bytes=4_000_000,
            shard_tokens=SHARD_TOKENS,
            holdout=0.0,
            part="train",
        ),
        shards=entries,
        sources=[],
    )
    write_manifest(directory, manifest)
