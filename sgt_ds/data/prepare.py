"""`data prepare`: inputs to a prepared set, with any number of workers, resumable after kills.

Knows the order of the work and what a finished set is; `file_work` does a file, `pool` hands files
out. Everything in the set is a function of inputs, tokenizer and settings alone: times, paths of
this machine and the number of workers stand in the report only.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from sgt_ds.data.file_work import (
    WORK,
    FileRecord,
    Job,
    PartRecord,
    Tally,
    Task,
    Worker,
    fault_error,
)
from sgt_ds.data.inputs import InputFile, expand_inputs
from sgt_ds.data.locks import coordinator_lock, worker_lock
from sgt_ds.data.manifest import (
    NAME,
    Manifest,
    Settings,
    ShardlessFile,
    SourceEntry,
    TokenizerEntry,
    write_manifest,
)
from sgt_ds.data.pool import mpi_communicator, run_here, run_mpi, run_processes
from sgt_ds.data.preparation import SKIPPED, Preparation, Report
from sgt_ds.data.previous import check_same_job, finished_records, finished_set, is_begun
from sgt_ds.data.shards import token_dtype
from sgt_ds.data.tokenizers import Tokenizer
from sgt_ds.errors import SgtError, UserError, refusal
from sgt_ds.files import atomic_writer, sha256_of, write_text_atomically
from sgt_ds.progress import Progress, counted


def prepare(preparation: Preparation) -> Report | None:
    """Prepare a set, or finish one that was interrupted; a finished one is left as it is.

    Under mpirun every rank calls this; only rank 0 returns a report.
    Raises: UserError for bad input, by file and line; SgtError where a worker died.
    """
    communicator = mpi_communicator()
    if communicator is None:
        run = (
            run_here
            if preparation.workers == 1
            else partial(run_processes, workers=preparation.workers)
        )
        return _prepare(preparation, run, lambda job: None)
    if communicator.Get_rank() != 0:
        job = communicator.bcast(None)
        if job is not None:
            with worker_lock(job.out / WORK):
                for _ in run_mpi(Worker(job), [], communicator):
                    pass
        return None
    try:
        return _prepare(
            preparation, partial(run_mpi, communicator=communicator), communicator.bcast
        )
    except SgtError as error:
        # The other ranks are in mid-file or wait for word: end them all.
        print(f"sgt-ds: {error}", file=sys.stderr, flush=True)
        communicator.Abort(error.exit_code)
        raise


Run = Callable[[Worker, Sequence[Task]], Iterator[Any]]


def _prepare(
    preparation: Preparation, run: Run, announce: Callable[[Job | None], object]
) -> Report:
    """`announce` tells other ranks the job, once; None where there is nothing to do."""
    if (preparation.holdout > 0) != (preparation.holdout_out is not None):
        raise UserError(
            "--holdout", None, "and --holdout-out must be used together; give both or neither"
        )
    if (
        preparation.holdout_out is not None
        and preparation.holdout_out.resolve() == preparation.out.resolve()
    ):
        raise UserError(preparation.out, "--holdout-out", "is --out as well; give two directories")
    files = expand_inputs(preparation.inputs)
    tokenizer = Tokenizer(
        preparation.tokenizer, eos=preparation.eos, special_tokens=preparation.special_tokens
    )
    if preparation.bos and tokenizer.bos_id is None:
        raise UserError(preparation.tokenizer, "bos", "has no BOS token; leave --bos out")
    if (preparation.out / NAME).exists():
        report = finished_set(preparation, files, tokenizer)
        announce(None)
        return report
    directories = [preparation.out, *([preparation.holdout_out] if preparation.holdout_out else [])]
    try:
        for directory in directories:
            _check_fresh(directory, preparation.out)
            directory.mkdir(parents=True, exist_ok=True)
        with coordinator_lock(preparation.out, preparation.out / WORK):
            if (preparation.out / NAME).exists():
                raise UserError(preparation.out, None, "was just finished by another process")
            return _work(preparation, files, tokenizer, directories, run, announce)
    except OSError as error:
        message = refusal(error, "written", instead="give another --out")
        raise UserError(
            error.filename or preparation.out,
            None,
            f"{message}; the same command continues: finished files are kept",
        ) from None


def _work(
    preparation: Preparation,
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
    check_same_job(preparation, files, tokenizer)
    copy = preparation.out / _tokenizer_name(tokenizer)
    for directory in directories:
        _copy(tokenizer.path, directory / copy.name)
    records = dict(finished_records(preparation, files))
    job = Job(
        tokenizer=copy,
        eos=preparation.eos,
        bos=preparation.bos,
        special_tokens=preparation.special_tokens,
        max_document_bytes=preparation.max_document_bytes,
        shard_tokens=preparation.shard_tokens,
        holdout=preparation.holdout,
        on_error=preparation.on_error,
        out=preparation.out,
        holdout_out=preparation.holdout_out,
    )
    tasks = [Task(number, file) for number, file in enumerate(files) if number not in records]
    # Largest first, so that no worker ends long after the others.
    tasks.sort(key=lambda task: (-task.file.bytes, task.number))
    report = Report(str(preparation.out), len(files), reused_files=len(records))
    announce(job)
    total = Tally(0, 0, 0, 0)
    with Progress("prepare", sum(task.file.bytes for task in tasks), "B") as progress:
        for message in run(Worker(job), tasks):
            if isinstance(message, FileRecord):
                records[message.number] = message
                _check_hope(preparation, files, list(records.values()))
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
    _check_faults(preparation, files, ordered)
    _finish(preparation, tokenizer, ordered)
    report.count(ordered)
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
    """A directory of someone else's files is not written to; one of ours is continued."""
    if is_begun(directory, out) or not directory.exists():
        return
    if not directory.is_dir():
        raise UserError(directory, None, "is a file; give a directory, new or existing")
    if any(directory.iterdir()):
        raise UserError(directory, None, "is not empty; give a new directory, or empty it")


# Files are no even sample of each other: a run ends early only with half as many faults again.
HOPELESS = 1.5


def _check_hope(preparation: Preparation, files: list[InputFile], done: list[FileRecord]) -> None:
    """Raise UserError as soon as the limit would be passed though no other fault came.

    The documents still to come are guessed from the bytes of files still to come.
    """
    bad = sum(sum(record.skipped.values()) for record in done)
    if not bad or len(done) == len(files):
        return
    good = sum(record.train.documents + record.holdout.documents for record in done)
    share_done = sum(record.bytes for record in done) / max(sum(file.bytes for file in files), 1)
    if bad * share_done > HOPELESS * preparation.max_bad_fraction * (good + bad):
        _check_faults(preparation, files, sorted(done, key=lambda record: record.number))


def _check_faults(
    preparation: Preparation, files: list[InputFile], records: list[FileRecord]
) -> None:
    bad = sum(sum(record.skipped.values()) for record in records)
    if not bad:
        return
    file, fault = next(
        (files[record.number], fault) for record in records for fault in record.faults
    )
    if preparation.on_error == "stop":  # an earlier attempt skipped
        raise fault_error(file.location, fault.line, fault.reason, fault.detail)
    good = sum(record.train.documents + record.holdout.documents for record in records)
    share = bad / (good + bad)
    where = "" if len(records) == len(files) else f" in {len(records)} of {len(files)} files"
    if share > preparation.max_bad_fraction:
        raise UserError(
            file.location,
            f"line {fault.line}",
            f"{fault.detail} ({fault.reason}) is the first of {counted(bad, 'fault')}, with "
            f"{counted(good, 'good document')}{where}: {share:.4f} is above --max-bad-fraction "
            f"{preparation.max_bad_fraction:g}; fix "
            "the files, or raise it",
        )


def _finish(preparation: Preparation, tokenizer: Tokenizer, records: list[FileRecord]) -> None:
    """Write the list of damage and the manifests, the main set's last of all."""
    skipped = None
    lines = [
        json.dumps({"file": record.name, **fault.model_dump()}) + "\n"
        for record in records
        for fault in record.faults
    ]
    if lines:
        path = preparation.out / SKIPPED
        write_text_atomically(path, "".join(lines))
        skipped = ShardlessFile(file=SKIPPED, bytes=path.stat().st_size, sha256=sha256_of(path))
    train = _manifest(preparation, tokenizer, records, "train", skipped)
    if preparation.holdout_out is not None:
        write_manifest(
            preparation.holdout_out, _manifest(preparation, tokenizer, records, "holdout", None)
        )
    write_manifest(preparation.out, train)
    shutil.rmtree(preparation.out / WORK, ignore_errors=True)


def _manifest(
    preparation: Preparation,
    tokenizer: Tokenizer,
    records: list[FileRecord],
    part: Literal["train", "holdout"],
    skipped: ShardlessFile | None,
) -> Manifest:
    def of(record: FileRecord) -> PartRecord:
        return record.train if part == "train" else record.holdout

    shards = [shard for record in records for shard in of(record).shards]
    if not shards:
        message = "no document is left" if part == "train" else "no document was held out"
        raise UserError(
            preparation.out if part == "train" else str(preparation.holdout_out),
            "--holdout" if preparation.holdout else None,
            f"{message}; give more input" + (", or another share" if preparation.holdout else ""),
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
            bos=preparation.bos,
            special_tokens=preparation.special_tokens,
            max_document_bytes=preparation.max_document_bytes,
            shard_tokens=preparation.shard_tokens,
            holdout=preparation.holdout,
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
