"""Rows of metrics.jsonl and of the record of starts, read while a run may still be writing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from sgt_ds.errors import UserError, refusal

Row = dict[str, Any]


def read_objects(path: Path) -> list[Row]:
    """The objects of a file of JSON Lines; an unfinished last line is passed over.

    Empty where there is no such file. Raises: UserError naming the line that is not a JSON object.
    """
    try:
        whole = path.read_bytes().rpartition(b"\n")[0]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(path, None, refusal(error, "read")) from None
    return [
        parsed(path, number, line)
        for number, line in enumerate(whole.split(b"\n"), start=1)
        if line.strip()
    ]


def parsed(path: Path, number: int, line: bytes) -> Row:
    """The object of a line. Raises: UserError naming the line, `number` in the file from 1 on."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise UserError(path, f"line {number}", "is not a JSON object; correct or remove the line")
    return row


def add_row(rows: list[Row], row: Row) -> None:
    """Append a row that tells of a step, after dropping those that a resume has overtaken."""
    if not is_count(row.get("step")):
        return
    while rows and rows[-1]["step"] > row["step"]:
        rows.pop()
    rows.append(row)


def number(path: Path, row: Row, key: str) -> float:
    """A row's value as a number; NaN where it is absent or null.

    Raises: UserError where it is something else.
    """
    value = row.get(key)
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        where = f"step {row.get('step')}"
        raise UserError(path, where, f"{key} is {str(value)[:40]!r}, not a number; correct the row")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def is_count(value: object) -> bool:
    """Whether a value of JSON is a whole number from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
