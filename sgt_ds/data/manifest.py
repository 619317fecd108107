"""manifest.json: what a prepared set holds, written last. Knows names and checksums, no tokens.

A set without a manifest is unfinished. The text is canonical and carries its own checksum, so a
flipped byte in it is found like one in a shard.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sgt_ds.errors import UserError, refusal
from sgt_ds.files import write_text_atomically

NAME = "manifest.json"
REMEDY = "run `sgt-ds data prepare` again, or fetch the set again"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TokenizerEntry(_Part):
    """The tokenizer whose ids the shards hold; its file is in the set."""

    file: str
    kind: Literal["huggingface", "sentencepiece"]
    sha256: str
    vocab_size: int
    eos_id: int
    bos_id: int | None
    pad_id: int | None


class ShardEntry(_Part):
    """One shard file."""

    file: str
    source: str
    """Input file that its documents come from."""
    tokens: int
    documents: int
    bytes: int
    xxh3_128: str
    """Of the whole file."""


class SourceEntry(_Part):
    """One input file and what became of it."""

    name: str
    bytes: int
    xxh3_128: str
    """Of the file as it is there, compressed."""
    documents: int
    tokens: int
    characters: int
    skipped: dict[str, int]
    """Damaged documents by reason."""


class Settings(_Part):
    """What decides the bytes of the shards, beside inputs and tokenizer."""

    bos: bool
    """A BOS stands before each document."""
    special_tokens: bool
    """Special tokens spelt in the text become special tokens."""
    max_document_bytes: int
    shard_tokens: int
    """Tokens after which a new shard begins."""
    holdout: float
    """Share of the documents held out for validation, by a hash of their text."""
    part: Literal["train", "holdout"]


class Manifest(_Part):
    """The whole file."""

    format: Literal["sgt-token-set"] = "sgt-token-set"
    version: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    tokens: int
    documents: int
    characters: int
    tokenizer: TokenizerEntry
    settings: Settings
    shards: list[ShardEntry] = Field(min_length=1)
    sources: list[SourceEntry]
    skipped_list: ShardlessFile | None = None
    """skipped.jsonl: every damaged document, where there are any."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what a reader gets: tokenizer and shards' contents in order, no names."""
        content = [
            self.tokenizer.sha256,
            self.dtype,
            [[shard.tokens, shard.documents, shard.xxh3_128] for shard in self.shards],
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def files(self) -> dict[str, int | None]:
        """Names of all files of the set with their sizes (None: not stated)."""
        names: dict[str, int | None] = {NAME: None, self.tokenizer.file: None}
        names.update((shard.file, shard.bytes) for shard in self.shards)
        if self.skipped_list is not None:
            names[self.skipped_list.file] = self.skipped_list.bytes
        return names


class ShardlessFile(_Part):
    """A file of the set that holds no tokens."""

    file: str
    bytes: int
    sha256: str


Manifest.model_rebuild()


def manifest_text(manifest: Manifest) -> str:
    """The canonical text: one entry per line, keys in order, the checksum of the rest at the end."""
    values = manifest.model_dump(mode="json")
    return _text(values, hashlib.sha256(_compact(values).encode()).hexdigest())


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Finish a set."""
    write_text_atomically(directory / NAME, manifest_text(manifest))


def read_manifest(directory: Path) -> Manifest:
    """Read and check a set's manifest.

    Raises: UserError where `directory` holds no finished set of this version, or the manifest is
    damaged.
    """
    path = directory / NAME
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        what = "is not a prepared set" if directory.exists() else "does not exist"
        raise UserError(
            directory,
            None,
            f"{what} (no {NAME}); give a directory written by `sgt-ds data prepare`",
        ) from None
    except OSError as error:
        raise UserError(path, None, refusal(error, "read", REMEDY)) from None
    try:
        values = json.loads(content)
        if not isinstance(values, dict) or values.get("format") != "sgt-token-set":
            raise UserError(path, "format", f"is not the manifest of a prepared set; {REMEDY}")
        if values.get("version") != 1:
            raise UserError(
                path, "version", f"{values.get('version')!r} is not supported (only 1 is); {REMEDY}"
            )
        checksum = values.pop("checksum", None)
        manifest = Manifest.model_validate(values)
    except (ValueError, RecursionError) as error:  # JSON's, Unicode's and pydantic's errors too
        if isinstance(error, ValidationError):
            detail = error.errors()[0]
            where = ".".join(str(part) for part in detail["loc"])
            raise UserError(path, where, f"{detail['msg']}; {REMEDY}") from None
        raise UserError(path, None, f"is not valid JSON; {REMEDY}") from None
    if content != manifest_text(manifest).encode() or not isinstance(checksum, str):
        raise UserError(path, "checksum", f"does not match the content; {REMEDY}")
    return manifest


def is_set(directory: Path) -> bool:
    """Whether a manifest there says that it is of a prepared set; it may be a bad one."""
    try:
        values = json.loads((directory / NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and values.get("format") == "sgt-token-set"


def _text(values: dict[str, Any], checksum: str) -> str:
    lines = []
    for key, value in {**values, "checksum": checksum}.items():
        if isinstance(value, list):
            entries = ",\n".join(f"  {_compact(entry)}" for entry in value)
            lines.append(f" {_compact(key)}: [\n{entries}\n ]")
        else:
            lines.append(f" {_compact(key)}: {_compact(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(", ", ": "))
