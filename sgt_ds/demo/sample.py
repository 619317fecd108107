"""A small corpus from the user's own C4 shards: the first documents, one in twenty for validation.

The sample is small enough for two CPU cores; a real run prepares all shards with
`sgt-ds data prepare`. Knows no tokenizer.
"""

from __future__ import annotations

import glob
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import zstandard

from sgt_ds.demo.console import Console
from sgt_ds.errors import UserError
from sgt_ds.files import atomic_writer

VALIDATION_EVERY = 20


def fingerprint(pattern: str) -> list[tuple[str, int, int]]:
    """Name, size and time of change of each file of the pattern, in order of name.

    Raises: UserError where the pattern names no file.
    """
    return [(name, Path(name).stat().st_size, Path(name).stat().st_mtime_ns)
            for name in _files(pattern)]  # fmt: skip


def write_sample(out_dir: Path, pattern: str, size_bytes: int, console: Console) -> list[Path]:
    """Write `train.00000-of-00001.json.gz` and a validation shard from the pattern's first files.

    `size_bytes`: bytes of text (UTF-8) after which reading stops.
    Returns the files. Raises: UserError where a file is no C4 shard or holds too little.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    paths = [out_dir / f"{name}.00000-of-00001.json.gz" for name in ("train", "validation")]
    size = documents = 0
    used: set[str] = set()
    with atomic_writer(paths[0]) as train, atomic_writer(paths[1]) as validation:
        with _gzip(train) as train_out, _gzip(validation) as validation_out:
            for name, text in _texts(pattern):
                used.add(name)
                row = json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"
                (train_out if documents % VALIDATION_EVERY else validation_out).write(row)
                documents += 1
                size += len(text.encode())
                if size >= size_bytes and documents > 1:
                    break
                if documents % 1000 == 0:
                    console.progress(f"{documents:,} documents, {size / 1e6:.1f} MB")
        if documents < 2:
            raise UserError(pattern, None, "holds fewer than two documents; give more shards")
    console.note(
        f"used: the first {documents:,} documents, {size / 1e6:.1f} MB of text, from "
        f"{len(used)} of {len(_files(pattern))} files (up to {max(used)}); one in "
        f"{VALIDATION_EVERY} for validation"
    )
    return paths


def openings(corpus: Path, count: int, words: int) -> list[str]:
    """The first words of the first `count` validation documents."""
    with gzip.open(corpus / "validation.00000-of-00001.json.gz", "rt", encoding="utf-8") as rows:
        texts = [json.loads(row)["text"] for _, row in zip(range(count), rows, strict=False)]
    return [" ".join(text.split()[:words]) for text in texts]


def _files(pattern: str) -> list[str]:
    # pathlib's glob refuses absolute patterns.
    names = glob.glob(pattern, recursive=True)  # noqa: PTH207
    found = sorted(name for name in names if Path(name).is_file())
    if not found:
        raise UserError(pattern, None, "no such file; check the path or the pattern")
    return found


def _texts(pattern: str) -> Iterator[tuple[str, str]]:
    """File and text of each document. Raises: UserError naming file and line of a bad row."""
    for name in _files(pattern):
        where = 0
        try:
            with _open(name) as lines:
                for number, line in enumerate(lines, start=1):
                    where = number
                    text = json.loads(line)["text"] if line.strip() else ""
                    if text.strip():
                        yield name, text
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError,
                zstandard.ZstdError) as error:  # fmt: skip
            raise UserError(
                name, f"line {where}", f"is not a row of a C4 shard ({error}); give .json, .json.gz "
                "or .json.zst files with a field `text`"
            ) from None  # fmt: skip


def _open(name: str) -> IO[str]:
    if name.endswith(".zst"):
        return cast("IO[str]", zstandard.open(name, "rt", encoding="utf-8"))
    if name.endswith(".gz"):
        return gzip.open(name, "rt", encoding="utf-8")
    return Path(name).open(encoding="utf-8")


def _gzip(stream: IO[bytes]) -> Any:
    return gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0)
