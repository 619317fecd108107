"""Reading a growth journal line by line, with every fault named by file and line. Pure but for IO.

Two kinds of file are read: a run's own journal (header, measurements, decisions), and plain lines
`{"step": t, "entropy": [[head…] per layer]}`; both as text or compressed with Zstandard.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zstandard
from pydantic import ValidationError

from sgt_ds.config import GrowthConfig, ModelConfig
from sgt_ds.errors import UserError, refusal
from sgt_ds.growth.decision import Decision
from sgt_ds.growth.statistics import Measurement, Rows

JOURNAL_NAME = "growth.jsonl"
FORMAT = 1

_ZSTANDARD_MAGIC = b"\x28\xb5\x2f\xfd"
# Rounding in float32 takes a normalized entropy this far out of [0, 1]; more is no entropy.
_ROUNDING = 1e-5


@dataclass(frozen=True, slots=True)
class Header:
    """First line of a run's own journal: which run it is.

    `values`: the whole line, as written.
    """

    method: str
    growth: GrowthConfig
    model: ModelConfig
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DecisionLine:
    """A decision as journalled. `flops`: spent in training until then."""

    decision: Decision
    flops: int


Line = Measurement | DecisionLine


def check_shape(path: Path, line: Measurement, model: ModelConfig) -> None:
    """Raises: UserError where a line of the journal `path` is of a model of another shape."""
    found = (len(line.entropy), len(line.entropy[0]))
    if found != (model.num_layers, model.num_heads):
        raise UserError(
            path,
            None,
            f"has {found[0]} layers × {found[1]} heads, not {model.num_layers} × "
            f"{model.num_heads}; name the journal of a model of this shape",
        )


def journal_in(run: Path) -> Path:
    """The journal of a run directory; a path to a file is taken as it is. Raises: UserError."""
    if not run.is_dir():
        return run
    found = find_journal(run)
    if found is None:
        raise UserError(run, None, f"holds no {JOURNAL_NAME}; give a run directory or a journal")
    return found


def find_journal(run: Path) -> Path | None:
    """The journal of a run directory, or the file given; None where there is none."""
    names = ("", JOURNAL_NAME, f"{JOURNAL_NAME}.zst")
    return next((run / name for name in names if (run / name).is_file()), None)


def read_journal(path: Path, *, live: bool = False) -> tuple[Header | None, Iterator[Line]]:
    """The header, where there is one, and the lines after it, read as they are asked for.

    `live`: the run may still be writing, so an unfinished last line is passed over.
    Raises: UserError naming file and line, from the call or from the iterator.
    """
    texts = _texts(path, live)
    first = next(texts, None)
    if first is None:
        raise UserError(path, None, "is empty; a journal has one JSON object per line")
    number, values = first
    if values.get("type") == "header":
        header = _header(path, number, values)
        return header, _lines(path, texts, header.model)
    return None, _lines(path, _chain(first, texts), None)


def _texts(path: Path, live: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    try:
        with path.open("rb") as stream:
            packed = stream.read(len(_ZSTANDARD_MAGIC)) == _ZSTANDARD_MAGIC
            stream.seek(0)
            for number, text in enumerate(_unpacked(stream) if packed else stream, start=1):
                if not text.strip():
                    continue
                if live and not text.endswith(b"\n"):
                    return
                yield number, _object(path, number, text)
    except FileNotFoundError:
        raise UserError(path, None, "no such journal; check the path") from None
    except OSError as error:
        raise UserError(path, None, refusal(error, "read")) from None
    except zstandard.ZstdError as error:
        where = f"line {number + 1}"
        raise UserError(path, where, f"is not a complete Zstandard file ({error})") from None


def _unpacked(stream: IO[bytes]) -> Iterator[bytes]:
    """The lines of a Zstandard stream of one or several frames. Raises: ZstdError if cut short."""
    decoder, rest = None, b""
    while piece := stream.read(4096):  # small: a piece of zeros unpacks to 30,000 times its size
        while piece:
            decoder = decoder or zstandard.ZstdDecompressor().decompressobj()
            rest += decoder.decompress(piece)
            piece, decoder = decoder.unused_data, None if decoder.eof else decoder
        *lines, rest = rest.split(b"\n")
        for text in lines:
            yield text + b"\n"
    if decoder is not None:
        raise zstandard.ZstdError("it ends in the middle of a frame")
    if rest:
        yield rest


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not valid JSON; write null for a value that is not finite")


def _object(path: Path, number: int, text: bytes) -> dict[str, Any]:
    where = f"line {number}"
    try:
        values = json.loads(text.decode(), parse_constant=_no_number)
    except RecursionError:
        raise UserError(path, where, "is nested too deeply; it is not a journal line") from None
    except ValueError as error:
        cut = "is truncated" if not text.endswith(b"\n") else None
        if b"\0" in text:
            cut = "is not JSON but NUL characters, as a power cut leaves them"
        if cut is not None:
            remedy = "resume the run, which repairs its journal, or remove the line"
            raise UserError(path, where, f"{cut}; {remedy}") from None
        problem = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise UserError(path, where, f"is not JSON ({problem}); correct it") from None
    if not isinstance(values, dict):
        raise UserError(path, where, "is not a JSON object; a journal has one object per line")
    return values


def _header(path: Path, number: int, values: dict[str, Any]) -> Header:
    if values.get("format") != FORMAT:
        message = (
            f"format {values.get('format')!r} is not supported; this version reads format {FORMAT}"
        )
        raise UserError(path, f"line {number}", message)
    try:
        return Header(
            method=str(values["method"]),
            growth=GrowthConfig.model_validate(values["growth"]),
            model=ModelConfig.model_validate(values["model"]),
            values=values,
        )
    except KeyError as error:
        raise UserError(path, f"line {number}", f"the header lacks {error}") from None
    except ValidationError as error:
        detail = error.errors()[0]
        field = ".".join(str(part) for part in detail["loc"])
        raise UserError(path, f"line {number}", f"the header's {field}: {detail['msg']}") from None


def _chain(
    first: tuple[int, dict[str, Any]], rest: Iterator[tuple[int, dict[str, Any]]]
) -> Iterator[tuple[int, dict[str, Any]]]:
    yield first
    yield from rest


def _lines(
    path: Path, texts: Iterator[tuple[int, dict[str, Any]]], model: ModelConfig | None
) -> Iterator[Line]:
    shape = None if model is None else (model.num_layers, model.num_heads)
    measured = last = -1
    for number, values in texts:
        where = f"line {number}"
        kind = values.get("type", "measure")
        if kind == "measure":
            measurement = _measurement(path, where, values)
            found = (len(measurement.entropy), len(measurement.entropy[0]))
            shape = shape or found
            if found != shape:
                message = f"has {found[0]} layers × {found[1]} heads where {shape[0]} × {shape[1]}"
                raise UserError(path, where, f"{message} came before; it belongs to another model")
            if measurement.step <= measured or measurement.step < last:
                message = f"step {measurement.step} comes after step {max(measured, last)}"
                raise UserError(path, where, f"{message}; sort the lines by step")
            measured = last = measurement.step
            yield measurement
        elif kind == "decision":
            line = _decision(path, where, values)
            if line.decision.step < last:
                message = (
                    f"step {line.decision.step} comes after step {last}; sort the lines by step"
                )
                raise UserError(path, where, message)
            last = line.decision.step
            yield line
        elif kind == "header":
            raise UserError(path, where, "a second header; a journal belongs to one run")
        else:
            raise UserError(path, where, f"type {kind!r} is not header, measure or decision")


def _measurement(path: Path, where: str, values: dict[str, Any]) -> Measurement:
    step = values.get("step")
    if not _is_count(step):
        raise UserError(path, where, f"step {step!r} is not a count; it is not a journal line")
    entropy = _rows(path, where, "entropy", values.get("entropy"), highest=1.0)
    if values.get("stderr") is None:
        stderr: Rows = tuple((math.nan,) * len(heads) for heads in entropy)
    else:
        stderr = _rows(path, where, "stderr", values["stderr"], highest=math.inf)
        if [len(heads) for heads in stderr] != [len(heads) for heads in entropy]:
            raise UserError(path, where, "stderr and entropy have different shapes")
    sequences = values.get("sequences", 0)
    if not _is_count(sequences):
        raise UserError(path, where, f"sequences {sequences!r} is not a count; correct it")
    adopted = values.get("adopted", False)
    if not isinstance(adopted, bool):
        raise UserError(path, where, f"adopted is {adopted!r}; give true or false")
    return Measurement(int(values["step"]), entropy, stderr, int(sequences), adopted)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _rows(path: Path, where: str, field: str, rows: object, *, highest: float) -> Rows:
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        message = (
            f"{field} must be a list of layers, each a list of heads; it is not a journal line"
        )
        raise UserError(path, where, message)
    if not rows[0] or any(len(row) != len(rows[0]) for row in rows):
        raise UserError(path, where, f"{field} must have the same number of heads in every layer")
    result = []
    for layer, heads in enumerate(rows):
        row = []
        for head, value in enumerate(heads):
            place = f"{field} of layer {layer}, head {head}"
            if value is None:
                row.append(math.nan)
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UserError(path, where, f"{place} is {value!r}; give a number or null")
            try:
                value = float(value)
            except OverflowError:
                value = math.inf
            if not -_ROUNDING <= value <= highest + _ROUNDING:
                bounds = f"outside [0, {highest:g}]" if math.isfinite(highest) else "no error"
                raise UserError(path, where, f"{place} is {value!r}, {bounds}; correct it")
            row.append(min(highest, max(0.0, value)))
        result.append(tuple(row))
    return tuple(result)


def _decision(path: Path, where: str, values: dict[str, Any]) -> DecisionLine:
    try:
        return DecisionLine(Decision.from_json(values), int(values.get("flops", 0)))
    except KeyError as error:
        raise UserError(path, where, f"the decision lacks {error}; correct it") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(path, where, f"is not a valid decision ({error}); correct it") from None
