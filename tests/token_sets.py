"""Writes small prepared sets for tests, in the real format, without a tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from sgt_ds.data.manifest import (
    Manifest,
    Settings,
    ShardEntry,
    TokenizerEntry,
    write_manifest,
)
from sgt_ds.data.shards import write_shard

TOKENIZER_SHA256 = hashlib.sha256(b"tokenizer").hexdigest()


def write_token_set(
    directory: Path,
    shards: Sequence[npt.NDArray[Any] | Sequence[npt.NDArray[Any]]],
    *,
    vocab_size: int = 1000,
    tokenizer: bytes = b"tokenizer",
) -> Path:
    """A set with the given tokens: of each shard an array, its one document, or one of each."""
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").write_bytes(tokenizer)
    sha256 = hashlib.sha256(tokenizer).hexdigest()
    entries = []
    for number, content_of_shard in enumerate(shards):
        alone = isinstance(content_of_shard, np.ndarray)
        documents = [content_of_shard] if alone else list(content_of_shard)
        path = directory / f"{number:05d}-000.tokens"
        with write_shard(path, vocab_size, sha256) as writer:
            for document in documents:
                writer.add(document)
        content = path.read_bytes()
        entries.append(
            ShardEntry(
                file=path.name,
                source="made",
                tokens=sum(map(len, documents)),
                documents=len(documents),
                bytes=len(content),
                xxh3_128=xxhash.xxh3_128_hexdigest(content),
            )
        )
    manifest = Manifest(
        dtype="uint16" if vocab_size <= 1 << 16 else "uint32",
        tokens=sum(entry.tokens for entry in entries),
        documents=sum(entry.documents for entry in entries),
        characters=0,
        tokenizer=TokenizerEntry(
            file="tokenizer.json",
            kind="huggingface",
            sha256=sha256,
            vocab_size=vocab_size,
            eos_id=0,
            bos_id=None,
            pad_id=None,
        ),
        settings=Settings(
            bos=False,
            special_tokens=False,
            max_document_bytes=4_000_000,
            shard_tokens=1 << 28,
            holdout=0.0,
            part="train",
        ),
        shards=entries,
        sources=[],
    )
    write_manifest(directory, manifest)
    return directory


def numbered_set(directory: Path, sequences: Sequence[int], length: int, first: int = 0) -> Path:
    """A set of shards with so many sequences each, where every sequence is known by its targets.

    Target values of sequence i are first + i (over all shards).
    """
    shards, number = [], first
    for count in sequences:
        targets = np.repeat(np.arange(number, number + count), length)
        shards.append(np.concatenate([[0], targets]))
        number += count
    return write_token_set(directory, shards, vocab_size=1 << 20)
