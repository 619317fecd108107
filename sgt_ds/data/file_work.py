"""One input file to its token shards: the work of a worker. Knows nothing of other files.

A file is done when its record exists; the record is written after its shards, each of which appears
whole. So whatever kills a worker, a file is done or will be done again from its start, with the
same bytes.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import xxhash
from pydantic import BaseModel, ConfigDict

from sgt_ds.data.decompress import Damage
from sgt_ds.data.inputs import HashingReader, InputFile
from sgt_ds.data.locks import worker_lock
from sgt_ds.data.manifest import ShardEntry
from sgt_ds.data.readers import Document, Fault, read_documents
from sgt_ds.data.shards import ShardWriter, write_shard
from sgt_ds.data.tokenizers import Ids, Tokenizer
from sgt_ds.errors import UserError, refusal
from sgt_ds.files import write_text_atomically
from sgt_ds.progress import counted

WORK = ".work"
# Documents are encoded in batches of about this much text: memory, and time between two messages.
BATCH_BYTES = 1 << 16
BATCH_DOCUMENTS = 128
# A shard's index is held in memory while it is written.
SHARD_DOCUMENTS = 1 << 22
# Faults of one file that are listed one by one; all are counted.
LISTED_FAULTS = 1000
# A thousand workers each telling twenty times a second would keep their coordinator busy.
TALLY_SECONDS = 0.25
# With more faults than this, and more faults than documents, a file is not C4 at all.
HOPELESS_FAULTS = 1000
_HOLDOUT_SEED = 0x5347545F  # fixed: the split must be the same in every version


@dataclass(frozen=True)
class Job:
    """What is the same for all files. Pickles."""

    tokenizer: Path
    eos: str | None
    bos: bool
    special_tokens: bool
    max_document_bytes: int
    shard_tokens: int
    holdout: float
    on_error: Literal["stop", "skip"]
    out: Path
    holdout_out: Path | None


@dataclass(frozen=True)
class Task:
    """One input file and its place among all."""

    number: int
    file: InputFile


@dataclass(frozen=True)
class Tally:
    """What was done since the last tally of the same worker."""

    documents: int
    tokens: int
    text_bytes: int
    input_bytes: int

    def plus(self, documents: int, tokens: int, text_bytes: int, input_bytes: int) -> Tally:
        """The sum."""
        return Tally(
            self.documents + documents,
            self.tokens + tokens,
            self.text_bytes + text_bytes,
            self.input_bytes + input_bytes,
        )


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FaultEntry(_Part):
    """One line of the list of damage."""

    line: int
    reason: str
    detail: str


class PartRecord(_Part):
    """What went to one of the sets."""

    shards: list[ShardEntry] = []
    documents: int = 0
    tokens: int = 0
    characters: int = 0


class FileRecord(_Part):
    """A finished file: `.work/NNNNN.json`."""

    number: int
    name: str
    bytes: int
    version: str
    xxh3_128: str
    train: PartRecord
    holdout: PartRecord
    skipped: dict[str, int]
    """Faults by reason."""
    faults: list[FaultEntry]
    """The first of them."""


def record_path(out: Path, number: int) -> Path:
    """Where a file's record lies while the set is unfinished."""
    return out / WORK / f"{number:05d}.json"


class Worker:
    """Factory for `pool`: calling it loads the tokenizer, in the process that will work."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self) -> FileHandler:
        # One core a worker: the library would otherwise take them all in each.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        job = self.job
        if multiprocessing.parent_process() is not None:
            self._held = worker_lock(job.out / WORK)  # as long as this process lives
        tokenizer = Tokenizer(job.tokenizer, eos=job.eos, special_tokens=job.special_tokens)
        return FileHandler(job, tokenizer)


class FileHandler:
    """Turns a task into tallies and, at last, the file's record."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self.job, self.tokenizer = job, tokenizer

    def __call__(self, task: Task) -> Iterator[Tally | FileRecord]:
        """Raises: UserError at the first fault under `on_error: stop`, or where writing fails."""
        try:
            yield from self._prepare(task)
        except OSError as error:  # reading's own are Damage by now
            message = refusal(error, "written", instead="give another --out")
            raise UserError(
                self.job.out,
                None,
                f"{message}; the same command continues: finished files are kept",
            ) from None

    def _prepare(self, task: Task) -> Iterator[Tally | FileRecord]:
        job, file = self.job, task.file
        faults, checksum, told = _Faults(job.on_error, file), "", 0
        tally, next_tally = Tally(0, 0, 0, 0), time.monotonic() + TALLY_SECONDS
        with (
            _Series(job.out, task, self.tokenizer, job.shard_tokens) as train,
            _Series(job.holdout_out or job.out, task, self.tokenizer, job.shard_tokens) as holdout,
        ):
            try:
                reader = HashingReader(file)
            except Damage as damage:
                faults.add(Fault(0, damage.reason, damage.detail))
            else:
                try:
                    for batch in self._batches(reader, faults):
                        tokens = self._write(batch, train, holdout)
                        text_bytes = sum(len(document.content) for document in batch)
                        tally = tally.plus(len(batch), tokens, text_bytes, 0)
                        if time.monotonic() >= next_tally:
                            yield tally.plus(0, 0, 0, reader.bytes - told)
                            tally, told = Tally(0, 0, 0, 0), reader.bytes
                            next_tally = time.monotonic() + TALLY_SECONDS
                    checksum = _rest(reader)
                finally:
                    reader.close()
                if checksum:
                    reader.check_unchanged()
        record = FileRecord(
            number=task.number,
            name=file.name,
            bytes=file.bytes,
            version=file.version,
            xxh3_128=checksum,
            train=train.record,
            holdout=holdout.record,
            skipped=dict(sorted(faults.counts.items())),
            faults=faults.listed,
        )
        write_text_atomically(record_path(job.out, task.number), record.model_dump_json())
        yield tally.plus(0, 0, 0, file.bytes - told)
        yield record

    def _batches(self, reader: HashingReader, faults: _Faults) -> Iterator[list[Document]]:
        batch: list[Document] = []
        size = documents = 0
        for found in read_documents(reader, self.job.max_document_bytes):
            if isinstance(found, Fault):
                faults.add(found, documents)
                continue
            documents += 1
            # A document larger than a batch goes alone: its encoding takes memory enough.
            if batch and size + len(found.content) > BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(found)
            size += len(found.content)
            if len(batch) >= BATCH_DOCUMENTS:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _write(self, batch: list[Document], train: _Series, holdout: _Series) -> int:
        tokens = 0
        texts = [document.text for document in batch]
        encoded = self.tokenizer.encode_batch(texts, bos=self.job.bos, eos=True)
        for document, ids in zip(batch, encoded, strict=True):
            series = holdout if is_held_out(document.content, self.job.holdout) else train
            series.add(ids, len(document.text))
            tokens += len(ids)
        return tokens


class _Faults:
    """What is wrong with one file: all counted, the first listed.

    Raises, when one is added: UserError under `on_error: stop`, or where the file is no C4 at all.
    """

    def __init__(self, on_error: Literal["stop", "skip"], file: InputFile) -> None:
        self._on_error, self._file = on_error, file
        self.counts: Counter[str] = Counter()
        self.listed: list[FaultEntry] = []

    def add(self, fault: Fault, documents: int = 0) -> None:
        location = self._file.location
        if self._on_error == "stop":
            raise fault_error(location, fault.line, fault.reason, fault.detail)
        self.counts[fault.reason] += 1
        total = self.counts.total()
        if total > max(HOPELESS_FAULTS, documents):
            raise UserError(
                location,
                f"line {fault.line}",
                f"is fault number {total} with only {counted(documents, 'good document')} ({fault.reason}): "
                "this is not a C4 file; leave it out",
            )
        if total <= LISTED_FAULTS:
            self.listed.append(
                FaultEntry(line=fault.line, reason=fault.reason, detail=fault.detail)
            )


def fault_error(
    location: str,
    line: int,
    reason: str,
    detail: str,
    remedy: str = "skip such documents with --on-error skip",
) -> UserError:
    """The error that stops the work at a fault. `remedy`: what to do other than fixing the file."""
    mend = "make it readable" if reason == "unreadable" else "fix the file"
    return UserError(
        location,
        f"line {line}" if line else None,
        f"{detail} ({reason}); {mend}, or {remedy}",
    )


def is_held_out(content: bytes, share: float) -> bool:
    """Whether a document belongs to the holdout: decided by its text's bytes alone."""
    return share > 0 and xxhash.xxh3_64_intdigest(content, seed=_HOLDOUT_SEED) < share * 2**64


def _rest(reader: HashingReader) -> str:
    """Checksum of the whole file, of which a fault may have left part unread; "" if it must be."""
    try:
        return reader.hexdigest()
    except OSError:
        return ""


class _Series:
    """Shards of one input file in one set, of bounded size. A context: its end finishes them."""

    def __init__(self, directory: Path, task: Task, tokenizer: Tokenizer, limit: int) -> None:
        self._directory, self._task, self._limit = directory, task, limit
        self._tokenizer = tokenizer
        self._context: AbstractContextManager[ShardWriter] | None = None
        self._writer: ShardWriter | None = None
        self._path, self._characters = directory, 0
        self.record = PartRecord(shards=[])

    def add(self, tokens: Ids, characters: int) -> None:
        writer = self._writer
        if writer and (writer.tokens >= self._limit or writer.documents >= SHARD_DOCUMENTS):
            self._finish()
        if self._writer is None:
            self._path = (
                self._directory / f"{self._task.number:05d}-{len(self.record.shards):03d}.tokens"
            )
            self._context = write_shard(
                self._path, self._tokenizer.vocab_size, self._tokenizer.sha256
            )
            self._writer = self._context.__enter__()
        self._writer.add(tokens)
        self._characters += characters

    def _finish(self) -> None:
        if self._writer is None or self._context is None:
            return
        tokens, documents = self._writer.tokens, self._writer.documents
        self.record.documents += documents
        self.record.tokens += tokens
        self.record.characters += self._characters
        self._characters = 0
        context, self._context, self._writer = self._context, None, None
        context.__exit__(None, None, None)
        # Read back: the checksum is of what is there.
        digest, size = xxhash.xxh3_128(), 0
        with self._path.open("rb") as stream:
            while piece := stream.read(1 << 20):
                digest.update(piece)
                size += len(piece)
        self.record.shards.append(
            ShardEntry(
                file=self._path.name,
                source=self._task.file.name,
                tokens=tokens,
                documents=documents,
                bytes=size,
                xxh3_128=digest.hexdigest(),
            )
        )

    def __enter__(self) -> _Series:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._finish()
        elif self._context is not None:
            self._context.__exit__(kind, error, trace)
