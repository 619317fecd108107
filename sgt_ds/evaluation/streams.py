"""What perplexity is measured on: token rows from a prepared set or texts, with their bytes.

Knows tokenizers and prepared sets, no model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sgt_ds.data import (
    Tokenizer,
    TokenSet,
    check_first,
    is_remote,
    is_remote_set,
    open_token_set,
    read_texts,
)
from sgt_ds.errors import UserError
from sgt_ds.evaluation.encoding import Encoder, TrainingEncoder

# How much of a prepared set is read again by the model's tokenizer, to see that it is the same.
_PROBE_TOKENS = 256


@dataclass(frozen=True)
class Stream:
    """A row of tokens. The first one is context; each other one is predicted once."""

    tokens: npt.NDArray[np.int64]
    end: int | None
    """The id between documents: it has no bytes, so bits per byte leave it out."""
    bytes: int
    """UTF-8 bytes of what the predicted tokens spell, `end` left out."""


def streams_of(
    location: str,
    encoder: Encoder,
    *,
    tokens: int | None = None,
    apart: bool = False,
    cache_dir: Path | None = None,
    verified: bool = False,
) -> list[Stream]:
    """Streams of a prepared set (a folder or URL with a manifest), or of the texts in files.

    `encoder`: the model's tokenizer. `tokens`: stop after so many; None reads all.
    `apart`: each text by itself, behind the token that begins a text; else texts stand in one row
    as in training, an end token after each. A prepared set is such rows already.
    `cache_dir`: as `open_token_set`. `verified`: hold what is read of a prepared set against its
    checksums first.
    Raises: UserError where nothing is there, or the set is damaged, or another tokenizer's.
    """
    if Path(location).is_dir() or is_remote_set(location):
        if apart:
            raise UserError(location, "--apart", "applies to texts; a prepared set is one row")
        token_set = open_token_set(location if is_remote(location) else Path(location), cache_dir)
        if verified:
            check_first(token_set, token_set.tokens if tokens is None else tokens + 1)
        _check_tokenizer(token_set, encoder)
        return set_streams(token_set, tokens)
    return text_streams(read_texts(location), encoder, location, tokens=tokens, apart=apart)


def set_streams(token_set: TokenSet, tokens: int | None) -> list[Stream]:
    """Streams of a prepared set, one a shard, of up to so many tokens together."""
    tokenizer = Tokenizer(token_set.tokenizer_file, eos=token_set.manifest.tokenizer.eos_id)
    left = token_set.tokens if tokens is None else tokens + 1
    found: list[Stream] = []
    for place in range(len(token_set.manifest.shards)):
        row = np.asarray(token_set.shard(place).tokens[:left], dtype=np.int64)
        token_set.check_ids(place, row)
        if len(row) > 1:
            found.append(Stream(row, tokenizer.eos_id, _spelt(tokenizer, row[1:])))
            left -= len(row) - 1
        if left <= 1:
            break
    if not found:
        raise UserError(token_set.name, None, "holds fewer than two tokens; prepare more")
    return found


def text_streams(
    texts: Iterable[str],
    encoder: Encoder,
    location: str,
    *,
    tokens: int | None,
    apart: bool,
) -> list[Stream]:
    """Streams of texts, of about so many tokens together."""
    opening = encoder.prefix if apart else encoder.end
    if opening is None:
        raise UserError(location, None, "the tokenizer has no end token; use --apart with texts")
    rows, sizes, left = [], [], tokens
    for text in texts:
        ids, size = encoder.encode(text, special=False), len(text.encode())
        if left is not None and len(ids) > left:
            ids = ids[:left]
            size = len(encoder.decode(ids).encode())
        if ids:
            rows.append(ids if apart else [*ids, opening])
            sizes.append(size)
        if left is not None:
            left -= len(rows[-1]) if ids else 0
            if left <= 0:
                break
    if not rows:
        raise UserError(location, None, "contains no text; give .txt or JSON Lines with `text`")
    if not apart:
        rows, sizes = [[token for row in rows for token in row]], [sum(sizes)]
    return [
        Stream(np.array([opening, *row], dtype=np.int64), None if apart else opening, size)
        for row, size in zip(rows, sizes, strict=True)
    ]


def _spelt(tokenizer: Tokenizer, row: npt.NDArray[np.int64]) -> int:
    """UTF-8 bytes of a row of documents."""
    ends = np.flatnonzero(row == tokenizer.eos_id)
    parts = np.split(row[row != tokenizer.eos_id], ends - np.arange(len(ends)))
    return sum(len(tokenizer.decode(part).encode()) for part in parts if len(part))


def _check_tokenizer(token_set: TokenSet, encoder: Encoder) -> None:
    own = Tokenizer(token_set.tokenizer_file, eos=token_set.manifest.tokenizer.eos_id)
    if isinstance(encoder, TrainingEncoder) and encoder.sha256 == own.sha256:
        return
    probe = token_set.shard(0).tokens[:_PROBE_TOKENS]
    token_set.check_ids(0, probe)
    text = own.decode(probe[probe != own.eos_id].tolist())
    if own.encode(text).tolist() != encoder.encode(text, special=False) or (
        encoder.end is not None and encoder.end != own.eos_id
    ):
        raise UserError(
            token_set.name, "tokenizer", "is not the model's; give texts, or prepare them again"
        )
