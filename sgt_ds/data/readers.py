"""C4 files as documents and faults: JSON Lines with `text`. Knows no tokenizer and no policy.

A fault is handed out like a document: whether it stops the work is the caller's to say. Memory is
bounded by the longest line that may still hold a document, whatever the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sgt_ds.data.decompress import Damage, Readable, decompressed

MAX_DOCUMENT_BYTES = 4_000_000
_BOM = b"\xef\xbb\xbf"
# JSON may spell a byte as six (\u0041), and other fields stand on the line too.
_ESCAPE_FACTOR = 6
_OTHER_FIELDS_BYTES = 1 << 16
# A line of 24 MB of brackets makes a gigabyte of Python objects: longer ones are looked over first.
_TRUSTED_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Document:
    """One document."""

    line: int
    """Line of the decompressed file, from 1."""
    text: str
    content: bytes
    """`text` in UTF-8."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One document, or the rest of a file, that cannot be used."""

    line: int
    reason: str
    """A fixed word, as `not-json`."""
    detail: str
    ends_file: bool = False
    """Nothing can be read behind it."""


def read_documents(
    stream: Readable, max_document_bytes: int = MAX_DOCUMENT_BYTES
) -> Iterator[Document | Fault]:
    """Documents and faults of a `.json`, `.jsonl`, gzip or zstd file, decided by its content.

    `stream`: the file's bytes. Blank lines, CRLF and a UTF-8 byte order mark are no faults.
    """
    number = 0
    limit = _ESCAPE_FACTOR * max_document_bytes + _OTHER_FIELDS_BYTES
    try:
        for number, line in _lines(decompressed(stream), limit):
            if line is None:
                yield Fault(number, "line-too-long", f"a line of more than {limit} bytes")
                continue
            if number == 1:
                line = line.removeprefix(_BOM)
            if not line.strip():
                continue
            yield _parsed(number, line, max_document_bytes)
    except Damage as damage:
        yield Fault(number + 1, damage.reason, damage.detail, ends_file=True)


def _lines(pieces: Iterable[bytes], limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines without their newline; None in place of one longer than `limit`."""
    number, started, size = 1, [b""], 0
    for piece in pieces:
        first, *others = piece.split(b"\n")
        size += len(first)
        if size > limit:
            started.clear()
        else:
            started.append(first)
        if not others:
            continue
        yield number, b"".join(started) if size <= limit else None
        number += 1
        for line in others[:-1]:
            yield number, line if len(line) <= limit else None
            number += 1
        started, size = [others[-1]], len(others[-1])
    if size:
        yield number, b"".join(started) if size <= limit else None


def _parsed(number: int, line: bytes, max_document_bytes: int) -> Document | Fault:
    if len(line) > _TRUSTED_LINE_BYTES and _is_more_than_text(line):
        return Fault(
            number,
            "line-too-long",
            f"holds more than {_OTHER_FIELDS_BYTES} bytes besides its texts",
        )
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Fault(number, "invalid-utf8", f"is not UTF-8 at byte {error.start + 1} of the line")
    except json.JSONDecodeError as error:
        return Fault(number, "not-json", f"is not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError):  # an integer of thousands of digits, nesting of thousands
        return Fault(number, "not-json", "is not readable JSON")
    if not isinstance(row, dict):
        return Fault(number, "not-an-object", "is JSON but not an object")
    if "text" not in row:
        return Fault(number, "no-text", "has no field `text`")
    text = row["text"]
    if not isinstance(text, str):
        return Fault(
            number, "text-not-a-string", f"`text` is {json.dumps(text)[:40]}, not a string"
        )
    if not text or text.isspace():
        return Fault(number, "empty-document", "`text` is empty")
    if "\0" in text:
        return Fault(number, "nul", "`text` holds a NUL character")
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        return Fault(
            number,
            "lone-surrogate",
            f"`text` holds a lone surrogate at character {error.start + 1}",
        )
    if len(content) > max_document_bytes:
        return Fault(
            number,
            "document-too-large",
            f"a document of {len(content)} bytes, above --max-document-bytes {max_document_bytes}",
        )
    return Document(number, text, content)


def _is_more_than_text(line: bytes) -> bool:
    """Whether more than a document's few fields stand outside the strings of a line of JSON."""
    bare = line.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > _OTHER_FIELDS_BYTES:
        return True
    return sum(map(len, bare.split(b'"')[::2])) > _OTHER_FIELDS_BYTES
