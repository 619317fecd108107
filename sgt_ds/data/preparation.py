"""Request and result of a preparation. Knows no worker and no file format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sgt_ds.data.file_work import FileRecord
from sgt_ds.data.readers import MAX_DOCUMENT_BYTES
from sgt_ds.progress import counted, duration

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
            f"{self.out}: {counted(self.documents, 'document')}, {self.tokens:,} tokens, "
            f"{self.characters_per_token:.2f} characters a token",
            f"{counted(self.files, 'file')} ({self.reused_files} done before) in "
            f"{duration(self.seconds)}: "
            f"{self.documents_per_second:,.0f} documents/s, {self.tokens_per_second:,.0f} tokens/s, "
            f"{self.megabytes_per_second:.2f} MB/s of text",
        ]
        if self.holdout_documents:
            lines.append(
                f"held out: {counted(self.holdout_documents, 'document')}, "
                f"{self.holdout_tokens:,} tokens"
            )
        for reason, count in self.skipped.items():
            lines.append(f"skipped: {count:,} × {reason}")
        if self.skipped_list:
            lines.append(f"{self.skipped_list} lists them by file and line")
        return "\n".join(lines)

    def count(self, records: Iterable[FileRecord]) -> None:
        """Add up what the finished files hold."""
        skipped: Counter[str] = Counter()
        for record in records:
            skipped.update(record.skipped)
            for part in (record.train, record.holdout):
                self.documents += part.documents
                self.tokens += part.tokens
                self.characters += part.characters
            self.holdout_documents += record.holdout.documents
            self.holdout_tokens += record.holdout.tokens
        self.characters_per_token = self.characters / max(self.tokens, 1)
        self.set_skipped(skipped)

    def set_skipped(self, skipped: Counter[str]) -> None:
        """Say how many documents were skipped, by reason, and which file lists them."""
        self.skipped = dict(sorted(skipped.items()))
        self.skipped_list = str(Path(self.out) / SKIPPED) if skipped else None
