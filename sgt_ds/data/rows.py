"""Rows of JSON Lines and whole texts, from files small enough to be checked strictly.

Local or remote, plain, gzip or zstd, as the other inputs. Knows no task and no tokenizer: for
millions of documents there is `prepare`; here the first fault ends the work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sgt_ds.data.decompress import Damage, decompressed
from sgt_ds.data.inputs import HashingReader, expand_inputs
from sgt_ds.errors import UserError


def read_rows(pattern: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Rows of the files that `pattern` names: file, line from 1, and the line's JSON object.

    `pattern`: a path, a glob, or a URL of fsspec's. Blank lines are no rows.
    Raises: UserError where a file is missing or damaged, or a line is not a JSON object.
    """
    for location, content in _contents(pattern):
        for number, line in enumerate(content.split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                raise UserError(
                    location, f"line {number}", f"is not JSON ({error}); give JSON Lines"
                ) from None
            if not isinstance(row, dict):
                raise UserError(location, f"line {number}", "is not a JSON object; give JSON Lines")
            yield location, number, row


def read_texts(pattern: str) -> Iterator[str]:
    """Texts of the files that `pattern` names: each row's `text` of JSON Lines, else all of it.

    Which of both is told by the name: `.json` or `.jsonl`, with or without `.gz` or `.zst`.
    Raises: UserError as `read_rows`, and where a file is not UTF-8.
    """
    for file in expand_inputs([pattern]):
        name = file.location.removesuffix(".gz").removesuffix(".zst")
        if name.endswith((".json", ".jsonl")):
            for location, number, row in read_rows(file.location):
                text = row.get("text")
                if not isinstance(text, str):
                    raise UserError(location, f"line {number}", "has no string `text`; add it")
                yield text
            continue
        for location, content in _contents(file.location):
            try:
                yield content.decode()
            except UnicodeDecodeError as error:
                raise UserError(
                    location, f"byte {error.start}", "is not UTF-8; give a text file"
                ) from None


def _contents(pattern: str) -> Iterator[tuple[str, bytes]]:
    for file in expand_inputs([pattern]):
        try:
            reader = HashingReader(file)
            try:
                yield file.location, b"".join(decompressed(reader))
            finally:
                reader.close()
        except Damage as damage:
            mend = "make it readable, or " if damage.reason == "unreadable" else ""
            message = f"cannot be read ({damage.detail}); {mend}fetch it again"
            raise UserError(file.location, None, message) from None
