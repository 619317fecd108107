"""The manifest of a checkpoint: every file with its size and hash, written last.

Knows no torch and no DeepSpeed: a folder of files in, a list of faults out. A folder without a
readable manifest is no checkpoint.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from sgt_ds.errors import UserError, refusal
from sgt_ds.files import write_text_atomically

FORMAT = 1
MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.json"

# Far above what a run writes, far below what exhausts memory or the interpreter's stack.
LARGEST_JSON_BYTES = 64 << 20
DEEPEST_JSON = 50

PIECE_BYTES = 1 << 20

ANOTHER = "use another checkpoint"
"""The remedy where nothing can be done for this one."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What the manifest says of one file. `xxh3`: XXH3-128 of its bytes, in hex."""

    size: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's table of contents.

    `sequence`: one more than the largest in the folder when it was written. It orders checkpoints
    by age without a clock, also where a run went back to an earlier step.
    `validation_loss`: of these very weights, nats per token; None where they were not validated.
    """

    step: int
    sequence: int
    world_size: int
    files: Mapping[str, FileRecord]
    validation_loss: float | None = None

    @property
    def total_bytes(self) -> int:
        """Size of all files, the manifest left out."""
        return sum(record.size for record in self.files.values())


def record_of(path: Path, on_bytes: Callable[[int], None] | None = None) -> FileRecord:
    """Size and hash of a file as it lies on disk. `on_bytes` hears of each piece read."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as stream:
        while piece := stream.read(PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
    return FileRecord(size, digest.hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` into `folder`, whole or not at all."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "step": manifest.step,
        "sequence": manifest.sequence,
        "world_size": manifest.world_size,
        "validation_loss": manifest.validation_loss,
        "files": {
            name: {"size": record.size, "xxh3": record.xxh3}
            for name, record in sorted(manifest.files.items())
        },
    }
    document["seal"] = _seal(document)
    write_text_atomically(folder / MANIFEST_NAME, json.dumps(document, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Read and check a checkpoint's manifest; the files themselves are not touched.

    Raises: UserError where it is missing, malformed, of a later format, or names a file outside
    `folder`.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file() and not path.is_symlink():
        raise UserError(folder, MANIFEST_NAME, f"is missing: not a complete checkpoint; {ANOTHER}")
    document = read_json_object(path)
    version = document.get("format")
    if version != FORMAT:
        raise UserError(
            path, "format", f"{version!r} is not {FORMAT}, the one this version of sgt-ds reads"
        )
    files = document.get("files")
    if not isinstance(files, dict) or not files:
        raise UserError(path, "files", f"must be a table of files; {ANOTHER}")
    records: dict[str, FileRecord] = {}
    for name, entry in files.items():
        if not _is_plain_name(name):
            raise UserError(
                path,
                "files",
                f"{name!r} is not a plain file name; refusing to look outside {folder}",
            )
        size, digest = (
            (entry.get("size"), entry.get("xxh3")) if isinstance(entry, dict) else (None, None)
        )
        if not isinstance(digest, str):
            raise UserError(path, f"files.{name}", "needs an xxh3 hash")
        records[name] = FileRecord(_count(path, f"files.{name}.size", size), digest)
    step, sequence, world_size = (
        _count(path, key, document.get(key)) for key in ("step", "sequence", "world_size")
    )
    loss = document.get("validation_loss")
    if loss is not None and not isinstance(loss, float):
        raise UserError(path, "validation_loss", "must be a number with a decimal point, or null")
    if document.pop("seal", None) != _seal(document):
        raise UserError(path, "seal", "does not match the rest of the file; it was changed")
    return Manifest(step, sequence, world_size, records, loss)


def check_sizes(folder: Path, manifest: Manifest) -> list[str]:
    """Faults that show without reading any file: missing, foreign, linked, or of another size."""
    faults: list[str] = []
    present = {entry.name: entry for entry in os.scandir(folder)}
    for name, record in sorted(manifest.files.items()):
        entry = present.pop(name, None)
        if entry is None:
            faults.append(f"{name}: is missing")
        elif not entry.is_file(follow_symlinks=False):
            faults.append(f"{name}: is not a regular file")
        elif entry.stat().st_size != record.size:
            faults.append(
                f"{name}: has {entry.stat().st_size} bytes where {record.size} were written"
            )
    present.pop(MANIFEST_NAME, None)
    faults.extend(
        f"{name}: is unexpected; the manifest does not name it" for name in sorted(present)
    )
    return faults


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint, within bounds of size and nesting.

    Raises: UserError naming the file and the fault.
    """
    try:
        content = _bounded(path)
        if len(content) > LARGEST_JSON_BYTES:
            raise UserError(
                path, None, f"exceeds {LARGEST_JSON_BYTES} bytes, the limit for a checkpoint's JSON"
            )
        document = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise UserError(path, None, f"is nested deeper than {DEEPEST_JSON} levels") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(path, None, refusal(error, "read", ANOTHER)) from None
    except json.JSONDecodeError as error:
        raise UserError(
            path, f"line {error.lineno}", f"is not valid JSON: {error.msg}; {ANOTHER}"
        ) from None
    except ValueError as error:  # an integer of more digits than the interpreter converts
        raise UserError(path, None, refusal(error, "read", ANOTHER)) from None
    if nesting(document) > DEEPEST_JSON:
        raise UserError(path, None, f"is nested deeper than {DEEPEST_JSON} levels")
    if not isinstance(document, dict):
        raise UserError(path, None, f"must hold a JSON object; {ANOTHER}")
    return document


def _bounded(path: Path) -> bytes:
    """Bytes of a regular file, one more than the largest JSON has at most. Raises: OSError.

    A link may lead out of the folder, a pipe never answer, a device never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("is not a regular file")
        return stream.read(LARGEST_JSON_BYTES + 1)


def _seal(document: Mapping[str, Any]) -> str:
    """XXH3-128 of a manifest's values, whatever their layout: tells a damaged manifest."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(text.encode()).hexdigest()


def nesting(document: Any) -> int:
    """Levels of lists and objects in a JSON value; 0 for a number or a text."""
    deepest, waiting = 0, [(document, 0)]
    while waiting:
        value, level = waiting.pop()
        deepest = max(deepest, level)
        if isinstance(value, dict):
            waiting.extend((inner, level + 1) for inner in value.values())
        elif isinstance(value, list):
            waiting.extend((inner, level + 1) for inner in value)
    return deepest


def _is_plain_name(name: str) -> bool:
    plain = name not in ("", ".", "..", MANIFEST_NAME) and not name.startswith("-")
    return plain and not any(character in name for character in "/\\\0\n\r")


def _count(path: Path, field: str, value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        said = repr(value)
        raise UserError(
            path,
            field,
            "must be a whole number below 2^63 (got "
            f"{said if len(said) < 40 else said[:40] + '…'})",
        )
    return value
