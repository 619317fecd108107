"""`bench prepare`: the cost of preparation relative to the bare tokenizer, on the same documents.

Knows the worker that prepares and the library under it; times both in turn, file by file of half a
second or so, so that a machine that is busy with something else slows both. CPU time says what a
core gives; the clock says it only on a machine with nothing else to do.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from sgt_ds.data.datatrove_baseline import NAME as PEER
from sgt_ds.data.datatrove_baseline import datatrove_preparation
from sgt_ds.data.file_work import WORK, FileHandler, FileRecord, Job, Task, Worker
from sgt_ds.data.inputs import HashingReader, expand_inputs
from sgt_ds.data.pool import Handler, run_processes
from sgt_ds.data.preparation import SHARD_TOKENS
from sgt_ds.data.readers import MAX_DOCUMENT_BYTES, Document, read_documents
from sgt_ds.data.tokenizers import Tokenizer
from sgt_ds.errors import UserError
from sgt_ds.progress import Progress

FILE_TEXT_BYTES = 1_000_000
ONE = "1 worker"
BARE, FAST = "batch encode", "batch encode without offsets"


_Input = TypeVar("_Input")


@dataclass(frozen=True)
class Cost:
    """One case in one round."""

    seconds: float
    """On the clock, from the first document to the last; processes are up by then."""
    cpu_seconds: float
    """Of all processes together."""


@dataclass(frozen=True)
class PrepareBench:
    """Costs are means over the rounds, ratios medians: of files, or of rounds."""

    documents: int
    tokens: int
    text_bytes: int
    workers: int
    rounds: int
    seconds: dict[str, float]
    cpu_seconds: dict[str, float]
    tokens_per_cpu_second: dict[str, float]
    documents_per_cpu_second: dict[str, float]
    per_core_ratio: float
    """CPU time of the bare batch encode over that of one worker on the same file."""
    per_core_ratio_fast: float | None
    """The same beside the encode that leaves out offsets, which Hugging Face's library has."""
    peer_ratio: float | None
    """CPU time of datatrove's own reader and tokenizer over that of one worker, where installed."""
    speedup_ratio: float
    """Clock of one worker over that of all; needs as many idle cores."""
    speedup_cpu_ratio: float
    """Workers times CPU time of one over that of all: the speed-up that idle cores would show."""

    def as_json(self) -> dict[str, Any]:
        """The figures as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class _Span:
    begin: float
    end: float
    cpu_seconds: float


class _Timed:
    """A handler that also tells when it worked."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def __call__(self, task: Task) -> Iterator[Any]:
        # CLOCK_MONOTONIC is one for all processes of a machine.
        begin, cpu = time.monotonic(), time.process_time()
        yield from self.handler(task)
        yield _Span(begin, time.monotonic(), time.process_time() - cpu)


class _TimedWorker:
    """The factory of such handlers. Pickles."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def __call__(self) -> Handler:
        return _Timed(self.worker())


def bench_prepare(
    inputs: Sequence[str],
    tokenizer_file: Path,
    *,
    text_bytes: int = 16_000_000,
    workers: int = 2,
    rounds: int = 5,
    scratch: Path | None = None,
) -> PrepareBench:
    """Time both on the first `text_bytes` of the inputs' documents.

    `scratch`: directory for the files that are prepared (default: the system's).
    Raises: UserError where the inputs hold no document.
    """
    tokenizer = Tokenizer(tokenizer_file)
    texts = _texts(inputs, text_bytes)
    size = sum(len(text.encode()) for text in texts)
    many = f"{workers} workers"
    with tempfile.TemporaryDirectory(prefix="sgt-ds-bench-", dir=scratch) as directory:
        root = Path(directory)
        count = workers * max(2, round(size / FILE_TEXT_BYTES / workers))
        tasks = _write_files(root / "in", texts, count)
        # One tokenizer for all cases: each would otherwise find caches full of another's tables.
        prepare = _Timed(FileHandler(_job(root / "one", tokenizer), tokenizer))
        others = _TimedWorker(Worker(_job(root / "many", tokenizer)))
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        cases: dict[str, Callable[[Task], Cost]] = {
            name: lambda task, encode=encode: _cost(encode, texts[task.number :: count])  # type: ignore[misc]
            for name, encode in tokenizer.bare_encoders().items()
        }
        cases[ONE] = lambda task: _sum(prepare(task))[0]
        if peer := datatrove_preparation(tokenizer, root / PEER):
            cases[PEER] = lambda task: _cost(peer, task)
        found: dict[str, list[Cost]] = {name: [] for name in (*cases, many)}
        order, tokens = random.Random(0), 0
        with Progress("bench", (rounds + 1) * (count + 1), "steps") as progress:
            for number in range(rounds + 1):
                costs: dict[str, list[Cost]] = {name: [] for name in found}
                for task in tasks:
                    # What follows what must not decide: memory that one frees is the next one's.
                    for name in order.sample(list(cases), len(cases)):
                        costs[name].append(cases[name](task))
                    progress.advance()
                cost, tokens = _sum(run_processes(others, tasks, workers))
                costs[many].append(cost)
                progress.advance()
                for name in found if number else ():  # the first round warms up
                    found[name] += costs[name]
    cpu = {name: [cost.cpu_seconds for cost in costs] for name, costs in found.items()}
    wall = {name: [cost.seconds for cost in costs] for name, costs in found.items()}
    one_cpu, one_wall = _rounds(cpu[ONE], rounds), _rounds(wall[ONE], rounds)
    totals = {name: sum(costs) / rounds for name, costs in cpu.items()}
    return PrepareBench(
        documents=len(texts),
        tokens=tokens,
        text_bytes=size,
        workers=workers,
        rounds=rounds,
        seconds={name: sum(costs) / rounds for name, costs in wall.items()},
        cpu_seconds=totals,
        tokens_per_cpu_second={name: tokens / cost for name, cost in totals.items()},
        documents_per_cpu_second={name: len(texts) / cost for name, cost in totals.items()},
        per_core_ratio=_ratio(cpu[BARE], cpu[ONE]),
        per_core_ratio_fast=_ratio(cpu[FAST], cpu[ONE]) if FAST in cpu else None,
        peer_ratio=_ratio(cpu[PEER], cpu[ONE]) if PEER in cpu else None,
        speedup_ratio=_ratio(one_wall, wall[many]),
        speedup_cpu_ratio=workers * _ratio(one_cpu, cpu[many]),
    )


def _rounds(costs: Sequence[float], rounds: int) -> list[float]:
    """Costs of single files, summed to rounds."""
    files = len(costs) // rounds
    return [sum(costs[number * files : (number + 1) * files]) for number in range(rounds)]


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(first / second for first, second in zip(above, below, strict=True))


def _cost(work: Callable[[_Input], object], given: _Input) -> Cost:
    begin, cpu = time.monotonic(), time.process_time()
    work(given)  # and let go of what came, as everybody does who encodes batch after batch
    return Cost(time.monotonic() - begin, time.process_time() - cpu)


def _sum(messages: Iterable[Any]) -> tuple[Cost, int]:
    """What a preparation cost, and its tokens."""
    spans, tokens = [], 0
    for message in messages:
        if isinstance(message, _Span):
            spans.append(message)
        elif isinstance(message, FileRecord):
            tokens += message.train.tokens
    clock = max(span.end for span in spans) - min(span.begin for span in spans)
    return Cost(clock, sum(span.cpu_seconds for span in spans)), tokens


def _texts(inputs: Sequence[str], text_bytes: int) -> list[str]:
    texts, size = [], 0
    for file in expand_inputs(inputs):
        reader = HashingReader(file)
        try:
            for found in read_documents(reader, MAX_DOCUMENT_BYTES):
                if isinstance(found, Document):
                    texts.append(found.text)
                    size += len(found.content)
                if size >= text_bytes:
                    return texts
        finally:
            reader.close()
    if not texts:
        raise UserError(inputs[0], None, "contains no documents; give C4 files")
    return texts


def _write_files(directory: Path, texts: Sequence[str], count: int) -> list[Task]:
    """The documents as C4 has them, in gzip files of about equal size."""
    directory.mkdir()
    for number in range(count):
        with gzip.open(directory / f"{number:03d}.json.gz", "wb", compresslevel=6) as stream:
            for text in texts[number::count]:
                row = {"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "https://c4.org"}
                stream.write(json.dumps(row).encode() + b"\n")
    files = expand_inputs([str(directory / "*")])
    return [Task(number, file) for number, file in enumerate(files)]


def _job(out: Path, tokenizer: Tokenizer) -> Job:
    (out / WORK).mkdir(parents=True)
    return Job(
        tokenizer=tokenizer.path,
        eos=None,
        bos=False,
        special_tokens=False,
        max_document_bytes=MAX_DOCUMENT_BYTES,
        shard_tokens=SHARD_TOKENS,
        holdout=0.0,
        on_error="stop",
        out=out,
        holdout_out=None,
    )
