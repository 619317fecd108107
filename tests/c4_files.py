"""Writes C4 files and a byte-level tokenizer for tests."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import tokenizers
import zstandard

WORDS = ["the", "a", "old", "river", "keeper", "lamp", "told", "Mara", "because", "near", "garden"]
WORDS += ["letter", "after", "road", "asked", "“yes”", "naïve", "東京", "🙂", "12", "1999"]


def story(seed: int, words: int = 80) -> str:
    """A text of so many words, with lines, double spaces, and characters beyond ASCII."""
    source = random.Random(seed)
    parts = [
        source.choice(WORDS) + source.choice((" ", " ", " ", ", ", ".\n", "  ", "\n\n\t"))
        for _ in range(words)
    ]
    return "".join(parts) + "End."


def row(text: object) -> bytes:
    """One line of C4's schema."""
    fields = {"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org/a"}
    return json.dumps(fields).encode() + b"\n"


def write_c4(path: Path, texts: Iterable[str]) -> Path:
    """A C4 file, compressed as its name says: zstd, gzip (of two members) or plain."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [row(text) for text in texts]
    half = len(rows) // 2
    parts = [b"".join(rows[:half]), b"".join(rows[half:])]
    if path.suffix == ".gz":
        path.write_bytes(b"".join(gzip.compress(part, mtime=0) for part in parts))
    elif path.suffix == ".zst":
        compressor = zstandard.ZstdCompressor(write_checksum=True)
        path.write_bytes(b"".join(compressor.compress(part) for part in parts))
    else:
        path.write_bytes(b"".join(parts))
    return path


@cache
def _bpe(vocabulary: int) -> str:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>", "<|padding|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([story(seed) for seed in range(50)], trainer)
    return str(tokenizer.to_str())


def write_tokenizer(path: Path, vocabulary: int = 500) -> Path:
    """A Hugging Face byte-level BPE tokenizer; EOS is 0."""
    path.write_text(_bpe(vocabulary), encoding="utf-8")
    return path


def texts_of(count: int, first: int = 0) -> Sequence[str]:
    """`count` different stories."""
    return [story(seed) for seed in range(first, first + count)]
