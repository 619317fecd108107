"""What an earlier attempt at a set left: whether it was the same job, and what it had finished.

Knows records, manifests and inputs; starts no work.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sgt_ds.data.decompress import Damage
from sgt_ds.data.file_work import WORK, FileRecord, record_path
from sgt_ds.data.inputs import HashingReader, InputFile
from sgt_ds.data.manifest import NAME, read_manifest
from sgt_ds.data.preparation import Preparation, Report
from sgt_ds.data.remote import is_remote
from sgt_ds.data.tokenizers import Tokenizer
from sgt_ds.errors import UserError
from sgt_ds.files import write_text_atomically

# As `file_work` names them.
_RECORDS, _SHARDS = "[0-9]*.json", "[0-9]*-[0-9]*.tokens"


def _identity(
    preparation: Preparation, names: list[str], tokenizer_sha256: str, eos_id: int
) -> dict[str, Any]:
    """What must not change between the attempts at one set."""
    return {
        "inputs": names,
        "tokenizer": tokenizer_sha256,
        "eos": eos_id,
        "bos": preparation.bos,
        "special_tokens": preparation.special_tokens,
        "max_document_bytes": preparation.max_document_bytes,
        "shard_tokens": preparation.shard_tokens,
        "holdout": preparation.holdout,
    }


def is_begun(directory: Path, out: Path) -> bool:
    """Whether an unfinished attempt at `out` writes to `directory`: what is there is its own."""
    if not (out / WORK).is_dir() or directory == out:
        return (out / WORK).is_dir()
    try:
        noted = json.loads((out / WORK / "job.json").read_text(encoding="utf-8"))
    except FileNotFoundError:  # killed before it wrote anything
        return False
    own = noted.get("holdout_out", str(directory.absolute()))  # earlier versions noted none
    # Both may have been moved.
    return own is not None and (own == str(directory.absolute()) or not Path(own).exists())


def check_same_job(preparation: Preparation, files: list[InputFile], tokenizer: Tokenizer) -> None:
    """See that an unfinished set is continued as it was begun, or note how it begins.

    One of which nothing is prepared yet may become another.
    Raises: UserError where it was begun otherwise.
    """
    path = preparation.out / WORK / "job.json"
    new = _identity(preparation, [file.name for file in files], tokenizer.sha256, tokenizer.eos_id)
    if path.exists():
        old = json.loads(path.read_text(encoding="utf-8"))
        try:
            _refuse_other(preparation.out, old, new, "was begun")
        except UserError:
            if _holds_documents(preparation.out):
                raise
            _clear(preparation.out, old.get("holdout_out"))
        else:
            return
    where = None if preparation.holdout_out is None else str(preparation.holdout_out.absolute())
    write_text_atomically(path, json.dumps({**new, "holdout_out": where}))


def _holds_documents(out: Path) -> bool:
    """Whether an earlier attempt finished a file that has any; a record that is damaged counts."""
    for path in (out / WORK).glob(_RECORDS):
        try:
            record = FileRecord.model_validate_json(path.read_bytes())
        except ValidationError:
            return True
        if record.train.documents + record.holdout.documents:
            return True
    return False


def _clear(out: Path, holdout_out: str | None) -> None:
    """Remove what attempts left that finished nothing: parts of files, the tokenizer's copy."""
    made = (_SHARDS, "tokenizer.json", "tokenizer.model")
    patterns = {out: made, out / WORK: (_RECORDS, _SHARDS)}
    # What is a set of its own by now is another's.
    if holdout_out is not None and not (Path(holdout_out) / NAME).exists():
        patterns[Path(holdout_out)] = made
    for directory, own in patterns.items():
        for pattern in own:
            for path in directory.glob(pattern):
                path.unlink()


def _refuse_other(out: Path, old: dict[str, Any], new: dict[str, Any], what: str) -> None:
    for key, value in new.items():
        if old.get(key) != value:
            shown = "" if isinstance(value, list) else f" ({old.get(key)}, now {value})"
            raise UserError(
                out,
                key,
                f"{what} with different {key}{shown}; use the same, give another --out, or remove it",
            )


def finished_set(preparation: Preparation, files: list[InputFile], tokenizer: Tokenizer) -> Report:
    """The report of a set that was finished before, if it is the one asked for."""
    manifest = read_manifest(preparation.out)
    old = {
        "inputs": [source.name for source in manifest.sources],
        "tokenizer": manifest.tokenizer.sha256,
        "eos": manifest.tokenizer.eos_id,
        **manifest.settings.model_dump(),
    }
    new = _identity(preparation, [file.name for file in files], tokenizer.sha256, tokenizer.eos_id)
    _refuse_other(preparation.out, old, new, "holds a set prepared")
    for file, source in zip(files, manifest.sources, strict=True):
        if file.bytes != source.bytes:
            how = f"{source.bytes} to {file.bytes} bytes"
        elif _touched_since(file, preparation.out / NAME) and _checksum(file) != source.xxh3_128:
            how = "different content"
        else:
            continue
        raise UserError(
            file.location,
            None,
            f"has changed since {preparation.out} was prepared ({how}); give another --out, or remove "
            "that set",
        )
    shutil.rmtree(preparation.out / WORK, ignore_errors=True)
    report = Report(str(preparation.out), len(files), reused_files=len(files))
    parts = [
        manifest,
        *([read_manifest(preparation.holdout_out)] if preparation.holdout_out else []),
    ]
    report.documents = sum(part.documents for part in parts)
    report.tokens = sum(part.tokens for part in parts)
    report.characters = sum(part.characters for part in parts)
    report.characters_per_token = report.characters / max(report.tokens, 1)
    if preparation.holdout_out:
        report.holdout_documents, report.holdout_tokens = parts[1].documents, parts[1].tokens
    skipped: Counter[str] = Counter()
    for source in manifest.sources:
        skipped.update(source.skipped)
    report.set_skipped(skipped)
    return report


def finished_records(
    preparation: Preparation, files: list[InputFile]
) -> Iterator[tuple[int, FileRecord]]:
    """Records of earlier attempts whose inputs are still the same.

    Raises: UserError where an input has changed.
    """
    for number, file in enumerate(files):
        path = record_path(preparation.out, number)
        try:
            record = FileRecord.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            continue
        except ValidationError:
            raise UserError(
                path, None, f"is damaged; delete it, and {file.name} is processed again"
            ) from None
        if (record.bytes, record.version) != (file.bytes, file.version) and (
            record.bytes != file.bytes or _checksum(file) != record.xxh3_128
        ):
            raise UserError(
                file.location,
                None,
                "has changed since an earlier attempt prepared it; restore it, give another --out, "
                f"or remove {preparation.out}",
            )
        yield number, record


def _touched_since(file: InputFile, manifest: Path) -> bool:
    """Whether a local file was written to after the manifest; what is remote is told by size."""
    return not is_remote(file.location) and int(file.version or 0) > manifest.stat().st_mtime_ns


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
