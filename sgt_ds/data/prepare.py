"""`data prepare`: inputs to a prepared set, with any number of workers, after any number of kills.

Knows the order of the work and what a finished set is; `file_work` does a file, `pool` hands files
out. Everything in the set is a function of inputs, tokenizer and settings alone: times, paths of
this machine and the number of workers stand in the report only.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from sgt_ds.data.decompress import Damage
from sgt_ds.data.file_work import (
    WORK,
    FileRecord,
    Job,
    PartRecord,
    Tally,
    Task,
    Worker,
    fault_error,
    record_path,
)
from sgt_ds.data.inputs import HashingReader, InputFile, expand_inputs
from sgt_ds.data.locks import coordinator_lock, worker_lock
from sgt_ds.data.manifest import (
    NAME,
    Manifest,
    Settings,
    ShardlessFile,
    SourceEntry,
    TokenizerEntry,
    read_manifest,
    write_manifest,
)
from sgt_ds.data.pool import mpi_communicator, run_here, run_mpi, run_processes
from sgt_ds.data.readers import MAX_DOCUMENT_BYTES
from sgt_ds.data.shards import token_dtype
from sgt_ds.data.tokenizers import Tokenizer
from sgt_ds.errors import SgtError, UserError
from sgt_ds.files import atomic_writer, sha256_of, write_text_atomically
from sgt_ds.progress import Progress, duration

SHARD_TOKENS = 1 << 28
SKIPPED = "skipped.jsonl"


@dataclass(frozen=True)
class Preparation:
    """What the user asks for."""

    inputs: tuple[str, ...]
    """Paths, globs or URLs."""
    tokenizer: Path
    out: Path
    workers: int = 1
    holdout: float = 0.0
    """Share of documents for `holdout_out`, by a hash of their text."""
    holdout_out: Path | None = None
    eos: str | None = None
    bos: bool = False
    special_tokens: bool = False
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    shard_tokens: int = SHARD_TOKENS
    on_error: Literal["stop", "skip"] = "stop"
    max_bad_fraction: float = 0.001


@dataclass
class Report:
    """What became of it. Counts are of both sets together, `holdout_*` of the one."""

    out: str
    files: int
    reused_files: int = 0
    """Files that an earlier attempt had finished."""
    documents: int = 0
    tokens: int = 0
    characters: int = 0
    characters_per_token: float = 0.0
    holdout_documents: int = 0
    holdout_tokens: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """Damaged documents by reason."""
    skipped_list: str | None = None
    """File that lists them: of each input, the first thousand."""
    seconds: float = 0.0
    documents_per_second: float = 0.0
    tokens_per_second: float = 0.0
    megabytes_per_second: float = 0.0
    """Of text, in UTF-8."""

    def as_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)

    def text(self) -> str:
        """The report for a person."""
        lines = [
            f"{self.out}: {self.documents:,} documents, {self.tokens:,} tokens, "
            f"{self.characters_per_token:.2f} characters a token",
            f"{self.files} files ({self.reused_files} done before) in {duration(self.seconds)}: "
            f"{self.documents_per_second:,.0f} documents/s, {self.tokens_per_second:,.0f} tokens/s, "
            f"{self.megabytes_per_second:.2f} MB/s of text",
        ]
        if self.holdout_documents:
            lines.append(
                f"held out: {self.holdout_documents:,} documents, {self.holdout_tokens:,} tokens"
            )
        for reason, count in self.skipped.items():
            lines.append(f"skipped: {count:,} × {reason}")
        if self.skipped_list:
            lines.append(f"{self.skipped_list} lists them by file and line")
        return "\n".join(lines)


def prepare(wish: Preparation) -> Report | None:
    """Prepare a set, or finish one that was interrupted; a finished one is left as it is.

    Under mpirun every rank calls this; only rank 0 returns a report.
    Raises: UserError for bad input, by file and line; SgtError where a worker died.
    """
    communicator = mpi_communicator()
    if communicator is None:
        run = run_here if wish.workers == 1 else partial(run_processes, workers=wish.workers)
        return _prepare(wish, run, lambda job: None)
    if communicator.Get_rank() != 0:
        job = communicator.bcast(None)
        if job is not None:
            with worker_lock(job.out / WORK):
                for _ in run_mpi(Worker(job), [], communicator):
                    pass
        return None
    try:
        return _prepare(wish, partial(run_mpi, communicator=communicator), communicator.bcast)
    except SgtError as error:
        # The other ranks are in mid-file or wait for word: end them all.
        print(f"sgt-ds: {error}", file=sys.stderr, flush=True)
        communicator.Abort(error.exit_code)
        raise


Run = Callable[[Worker, Sequence[Task]], Iterator[Any]]


def _prepare(wish: Preparation, run: Run, announce: Callable[[Job | None], object]) -> Report:
    """`announce` tells other ranks the job, once; None where there is nothing to do."""
    if (wish.holdout > 0) != (wish.holdout_out is not None):
        raise UserError("--holdout", None, "goes together with --holdout-out; give both or neither")
    if wish.holdout_out is not None and wish.holdout_out.resolve() == wish.out.resolve():
        raise UserError(wish.out, "--holdout-out", "is --out as well; give two directories")
    files = expand_inputs(wish.inputs)
    tokenizer = Tokenizer(wish.tokenizer, eos=wish.eos, special_tokens=wish.special_tokens)
    if wish.bos and tokenizer.bos_id is None:
        raise UserError(wish.tokenizer, "bos", "has no BOS token; leave --bos out")
    if (wish.out / NAME).exists():
        report = _finished(wish, files, tokenizer)
        announce(None)
        return report
    directories = [wish.out, *([wish.holdout_out] if wish.holdout_out else [])]
    try:
        for directory in directories:
            _check_fresh(directory, wish.out)
            directory.mkdir(parents=True, exist_ok=True)
        with coordinator_lock(wish.out, wish.out / WORK):
            if (wish.out / NAME).exists():
                raise UserError(wish.out, None, "was just finished by another process")
            return _work(wish, files, tokenizer, directories, run, announce)
    except OSError as error:
        raise UserError(
            error.filename or wish.out,
            None,
            f"cannot be written ({error.strerror or error}); make room or give another --out; "
            "the same command goes on: finished files are kept",
        ) from None


def _work(
    wish: Preparation,
    files: list[InputFile],
    tokenizer: Tokenizer,
    directories: list[Path],
    run: Run,
    announce: Callable[[Job | None], object],
) -> Report:
    started = time.monotonic()
    for directory in directories:
        for leftover in directory.glob(".*.tmp"):  # of a process that was killed
            leftover.unlink(missing_ok=True)
    _check_same_job(wish, files, tokenizer)
    copy = wish.out / _tokenizer_name(tokenizer)
    for directory in directories:
        _copy(tokenizer.path, directory / copy.name)
    records = dict(_finished_records(wish, files))
    job = Job(
        tokenizer=copy,
        eos=wish.eos,
        bos=wish.bos,
        special_tokens=wish.special_tokens,
        max_document_bytes=wish.max_document_bytes,
        shard_tokens=wish.shard_tokens,
        holdout=wish.holdout,
        on_error=wish.on_error,
        out=wish.out,
        holdout_out=wish.holdout_out,
    )
    tasks = [Task(number, file) for number, file in enumerate(files) if number not in records]
    # Largest first, so that no worker ends long after the others.
    tasks.sort(key=lambda task: (-task.file.bytes, task.number))
    report = Report(str(wish.out), len(files), reused_files=len(records))
    announce(job)
    total = Tally(0, 0, 0, 0)
    with Progress("prepare", sum(task.file.bytes for task in tasks), "B") as progress:
        for message in run(Worker(job), tasks):
            if isinstance(message, FileRecord):
                records[message.number] = message
                continue
            total = total.plus(
                message.documents, message.tokens, message.text_bytes, message.input_bytes
            )
            elapsed = time.monotonic() - started
            progress.advance(
                message.input_bytes,
                f"{total.documents / elapsed:,.0f} documents/s  "
                f"{total.tokens / elapsed:,.0f} tokens/s  "
                f"{total.text_bytes / elapsed / 1e6:.1f} MB/s of text",
            )
    ordered = [records[number] for number in range(len(files))]
    _check_faults(wish, files, ordered)
    _finish(wish, tokenizer, ordered, files)
    _count(report, ordered)
    report.seconds = time.monotonic() - started
    report.documents_per_second = total.documents / report.seconds
    report.tokens_per_second = total.tokens / report.seconds
    report.megabytes_per_second = total.text_bytes / report.seconds / 1e6
    return report


def _tokenizer_name(tokenizer: Tokenizer) -> str:
    return "tokenizer.json" if tokenizer.kind == "huggingface" else "tokenizer.model"


def _copy(source: Path, target: Path) -> None:
    with atomic_writer(target) as stream:
        stream.write(source.read_bytes())


def _check_fresh(directory: Path, out: Path) -> None:
    """A directory of somebody else's files is not written to; one of ours is gone on with."""
    if (out / WORK).is_dir() or not directory.exists():
        return
    if not directory.is_dir():
        raise UserError(directory, None, "is a file; give a directory, which may be new")
    if any(directory.iterdir()):
        raise UserError(directory, None, "is not empty; give a new directory, or empty it")


def _identity(
    wish: Preparation, names: list[str], tokenizer_sha256: str, eos_id: int
) -> dict[str, Any]:
    """What must not change between the attempts at one set."""
    return {
        "inputs": names,
        "tokenizer": tokenizer_sha256,
        "eos": eos_id,
        "bos": wish.bos,
        "special_tokens": wish.special_tokens,
        "max_document_bytes": wish.max_document_bytes,
        "shard_tokens": wish.shard_tokens,
        "holdout": wish.holdout,
    }


def _check_same_job(wish: Preparation, files: list[InputFile], tokenizer: Tokenizer) -> None:
    path = wish.out / WORK / "job.json"
    new = _identity(wish, [file.name for file in files], tokenizer.sha256, tokenizer.eos_id)
    if not path.exists():
        write_text_atomically(path, json.dumps(new))
        return
    _refuse_other(wish.out, json.loads(path.read_text(encoding="utf-8")), new, "was begun")


def _refuse_other(out: Path, old: dict[str, Any], new: dict[str, Any], what: str) -> None:
    for key, value in new.items():
        if old.get(key) != value:
            shown = "" if isinstance(value, list) else f" ({old.get(key)}, now {value})"
            raise UserError(
                out,
                key,
                f"{what} with other {key}{shown}; use the same, or give another --out",
            )


def _finished(wish: Preparation, files: list[InputFile], tokenizer: Tokenizer) -> Report:
    """The report of a set that was finished before, if it is the one asked for."""
    manifest = read_manifest(wish.out)
    old = {
        "inputs": [source.name for source in manifest.sources],
        "tokenizer": manifest.tokenizer.sha256,
        "eos": manifest.tokenizer.eos_id,
        **manifest.settings.model_dump(),
    }
    new = _identity(wish, [file.name for file in files], tokenizer.sha256, tokenizer.eos_id)
    _refuse_other(wish.out, old, new, "holds a set prepared")
    for file, source in zip(files, manifest.sources, strict=True):
        if file.bytes != source.bytes:
            raise UserError(
                file.location,
                None,
                f"has changed since {wish.out} was prepared ({source.bytes} to {file.bytes} "
                "bytes); give another --out",
            )
    shutil.rmtree(wish.out / WORK, ignore_errors=True)
    report = Report(str(wish.out), len(files), reused_files=len(files))
    parts = [manifest, *([read_manifest(wish.holdout_out)] if wish.holdout_out else [])]
    report.documents = sum(part.documents for part in parts)
    report.tokens = sum(part.tokens for part in parts)
    report.characters = sum(part.characters for part in parts)
    report.characters_per_token = report.characters / max(report.tokens, 1)
    if wish.holdout_out:
        report.holdout_documents, report.holdout_tokens = parts[1].documents, parts[1].tokens
    skipped: Counter[str] = Counter()
    for source in manifest.sources:
        skipped.update(source.skipped)
    _set_skipped(report, skipped, wish.out)
    return report


def _finished_records(
    wish: Preparation, files: list[InputFile]
) -> Iterator[tuple[int, FileRecord]]:
    """Records of earlier attempts whose inputs are still the same.

    Raises: UserError where an input has changed.
    """
    for number, file in enumerate(files):
        path = record_path(wish.out, number)
        try:
            record = FileRecord.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            continue
        except ValidationError:
            raise UserError(
                path, None, f"is damaged; delete it: {file.name} is done again"
            ) from None
        if (record.bytes, record.version) != (file.bytes, file.version) and (
            record.bytes != file.bytes or _checksum(file) != record.xxh3_128
        ):
            raise UserError(
                file.location,
                None,
                "has changed since an earlier attempt prepared it; restore it, or give another --out",
            )
        yield number, record


def _checksum(file: InputFile) -> str:
    try:
        reader = HashingReader(file)
    except Damage:
        return ""
    try:
        return reader.hexdigest()
    except OSError:
        return ""
    finally:
        reader.close()


def _check_faults(wish: Preparation, files: list[InputFile], records: list[FileRecord]) -> None:
    bad = sum(sum(record.skipped.values()) for record in records)
    if not bad:
        return
    file, fault = next(
        (files[record.number], fault) for record in records for fault in record.faults
    )
    if wish.on_error == "stop":  # an earlier attempt skipped
        raise fault_error(file.location, fault.line, fault.reason, fault.detail)
    good = sum(record.train.documents + record.holdout.documents for record in records)
    share = bad / (good + bad)
    if share > wish.max_bad_fraction:
        raise UserError(
            file.location,
            f"line {fault.line}",
            f"{fault.detail} ({fault.reason}) is the first of {bad} faults beside {good} "
            f"documents: {share:.4f} is above --max-bad-fraction {wish.max_bad_fraction:g}; mend "
            "the files, or raise it",
        )


def _count(report: Report, records: list[FileRecord]) -> None:
    skipped: Counter[str] = Counter()
    for record in records:
        skipped.update(record.skipped)
        for part in (record.train, record.holdout):
            report.documents += part.documents
            report.tokens += part.tokens
            report.characters += part.characters
        report.holdout_documents += record.holdout.documents
        report.holdout_tokens += record.holdout.tokens
    report.characters_per_token = report.characters / max(report.tokens, 1)
    _set_skipped(report, skipped, Path(report.out))


def _set_skipped(report: Report, skipped: Counter[str], out: Path) -> None:
    report.skipped = dict(sorted(skipped.items()))
    report.skipped_list = str(out / SKIPPED) if skipped else None


def _finish(
    wish: Preparation, tokenizer: Tokenizer, records: list[FileRecord], files: list[InputFile]
) -> None:
    """Write the list of damage and the manifests, the main set's last of all."""
    skipped = None
    lines = [
        json.dumps({"file": record.name, **fault.model_dump()}) + "\n"
        for record in records
        for fault in record.faults
    ]
    if lines:
        path = wish.out / SKIPPED
        write_text_atomically(path, "".join(lines))
        skipped = ShardlessFile(file=SKIPPED, bytes=path.stat().st_size, sha256=sha256_of(path))
    train = _manifest(wish, tokenizer, records, "train", skipped)
    if wish.holdout_out is not None:
        write_manifest(wish.holdout_out, _manifest(wish, tokenizer, records, "holdout", None))
    write_manifest(wish.out, train)
    shutil.rmtree(wish.out / WORK, ignore_errors=True)


def _manifest(
    wish: Preparation,
    tokenizer: Tokenizer,
    records: list[FileRecord],
    part: Literal["train", "holdout"],
    skipped: ShardlessFile | None,
) -> Manifest:
    def of(record: FileRecord) -> PartRecord:
        return record.train if part == "train" else record.holdout

    shards = [shard for record in records for shard in of(record).shards]
    if not shards:
        mend = "no document is left" if part == "train" else "no document was held out"
        raise UserError(
            wish.out if part == "train" else str(wish.holdout_out),
            "--holdout" if wish.holdout else None,
            f"{mend}; give more input" + (", or another share" if wish.holdout else ""),
        )
    return Manifest(
        dtype="uint16" if token_dtype(tokenizer.vocab_size).itemsize == 2 else "uint32",
        tokens=sum(of(record).tokens for record in records),
        documents=sum(of(record).documents for record in records),
        characters=sum(of(record).characters for record in records),
        tokenizer=TokenizerEntry(
            file=_tokenizer_name(tokenizer),
            kind=tokenizer.kind,
            sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            bos_id=tokenizer.bos_id,
            pad_id=tokenizer.pad_id,
        ),
        settings=Settings(
            bos=wish.bos,
            special_tokens=wish.special_tokens,
            max_document_bytes=wish.max_document_bytes,
            shard_tokens=wish.shard_tokens,
            holdout=wish.holdout,
            part=part,
        ),
        shards=shards,
        sources=[
            SourceEntry(
                name=record.name,
                bytes=record.bytes,
                xxh3_128=record.xxh3_128,
                documents=of(record).documents,
                tokens=of(record).tokens,
                characters=of(record).characters,
                skipped=record.skipped if part == "train" else {},
            )
            for record in records
        ],
        skipped_list=skipped,
    )
