"""Token shard format v1: a file of token ids with a header, a document index and checksums.

Knows bytes and arrays; no tokenizer, no text, no set of shards. docs/data-format.md shows the
layout to people who read it from elsewhere; the two change together.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import xxhash

from sgt_ds.errors import UserError, refusal
from sgt_ds.files import atomic_writer

MAGIC = b"SGTTOKEN"
VERSION = 1
HEADER_BYTES = 128
# magic, version, header bytes, bytes a token, vocabulary, tokens, documents,
# XXH3-128 of tokens, of index; SHA-256 of the tokenizer's file; then XXH3-64 of all before it.
_HEADER = struct.Struct("<8s4I2Q16s16s32s")
_HEADER_CHECKSUM = struct.Struct("<Q")
INDEX_DTYPE = np.dtype("<u8")
REMEDY = "prepare the set again, or fetch this file again"

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Smallest unsigned integer, little-endian, that holds every id of the vocabulary."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


@dataclass(frozen=True)
class ShardHeader:
    """What stands in front of the tokens."""

    dtype: np.dtype[Any]
    """uint16 or uint32, little-endian."""
    vocab_size: int
    """Ids are below it."""
    tokens: int
    documents: int
    tokens_checksum: bytes
    """XXH3-128 of the tokens' bytes, canonical (big-endian) form."""
    index_checksum: bytes
    """XXH3-128 of the document index's bytes."""
    tokenizer_sha256: bytes
    """SHA-256 of the tokenizer's file."""

    def pack(self) -> bytes:
        """The header's `HEADER_BYTES` bytes."""
        fields = _HEADER.pack(
            MAGIC,
            VERSION,
            HEADER_BYTES,
            self.dtype.itemsize,
            self.vocab_size,
            self.tokens,
            self.documents,
            self.tokens_checksum,
            self.index_checksum,
            self.tokenizer_sha256,
        )
        padded = fields.ljust(HEADER_BYTES - _HEADER_CHECKSUM.size, b"\0")
        return padded + _HEADER_CHECKSUM.pack(xxhash.xxh3_64_intdigest(padded))

    @classmethod
    def unpack(cls, path: Path, content: bytes) -> ShardHeader:
        """Read a header from a file's first bytes.

        Raises: UserError where they are no header of this version, or damaged.
        """
        if not content.startswith(MAGIC):
            raise UserError(path, "magic", f"is not a token shard; {REMEDY}")
        if len(content) < HEADER_BYTES:
            raise UserError(path, "header", f"is truncated; {REMEDY}")
        version = int.from_bytes(content[8:12], "little")
        if version != VERSION:
            raise UserError(
                path,
                "version",
                f"{version} is not supported (this version reads {VERSION}); prepare it again",
            )
        checked = content[: HEADER_BYTES - _HEADER_CHECKSUM.size]
        (checksum,) = _HEADER_CHECKSUM.unpack(content[len(checked) : HEADER_BYTES])
        if checksum != xxhash.xxh3_64_intdigest(checked):
            raise UserError(path, "header", f"does not match its checksum; {REMEDY}")
        _, _, size, width, vocabulary, tokens, documents, first, second, tokenizer = _HEADER.unpack(
            content[: _HEADER.size]
        )
        if size != HEADER_BYTES or width not in (2, 4):
            raise UserError(path, "header", f"holds impossible sizes; {REMEDY}")
        dtype = np.dtype(f"<u{width}")
        return cls(dtype, vocabulary, tokens, documents, first, second, tokenizer)

    @property
    def index_offset(self) -> int:
        """Byte at which the document index starts: the tokens are padded to eight bytes."""
        return HEADER_BYTES + -(-self.tokens * self.dtype.itemsize // 8) * 8

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.index_offset + (self.documents + 1) * INDEX_DTYPE.itemsize


class ShardWriter:
    """Streams documents into a shard. Made by `write_shard`."""

    def __init__(self, stream: IO[bytes], vocab_size: int, tokenizer_sha256: str) -> None:
        self._stream, self._vocab_size = stream, vocab_size
        self._tokenizer = bytes.fromhex(tokenizer_sha256)
        self._dtype = token_dtype(vocab_size)
        self._hash = xxhash.xxh3_128()
        self._starts = array("Q", [0])  # eight bytes each: there may be millions
        stream.write(bytes(HEADER_BYTES))

    @property
    def tokens(self) -> int:
        """Tokens written so far."""
        return self._starts[-1]

    @property
    def documents(self) -> int:
        """Documents written so far."""
        return len(self._starts) - 1

    def add(self, tokens: npt.NDArray[Any]) -> None:
        """Append one document, its EOS included. `tokens`: integers (tokens,), below vocab_size."""
        negative = tokens.dtype.kind != "u" and len(tokens) and int(tokens.min()) < 0
        if negative or (len(tokens) and int(tokens.max()) >= self._vocab_size):
            raise ValueError(f"token id outside the vocabulary of {self._vocab_size}")
        content = np.ascontiguousarray(tokens, dtype=self._dtype).data
        self._hash.update(content)
        self._stream.write(content)
        self._starts.append(self._starts[-1] + len(tokens))

    def finish(self) -> ShardHeader:
        """Write index and header. The header goes last: a file cut short has none."""
        index = np.asarray(self._starts, dtype=INDEX_DTYPE).tobytes()
        header = ShardHeader(
            self._dtype,
            self._vocab_size,
            self.tokens,
            self.documents,
            self._hash.digest(),
            xxhash.xxh3_128_digest(index),
            self._tokenizer,
        )
        self._stream.write(bytes(header.index_offset - self._stream.tell()))
        self._stream.write(index)
        self._stream.seek(0)
        self._stream.write(header.pack())
        return header


@contextmanager
def write_shard(path: Path, vocab_size: int, tokenizer_sha256: str) -> Iterator[ShardWriter]:
    """Write a shard that appears under `path` whole or not at all.

    The caller adds documents; the block's normal end finishes the file.
    """
    with atomic_writer(path) as stream:
        writer = ShardWriter(stream, vocab_size, tokenizer_sha256)
        yield writer
        writer.finish()


class Shard:
    """A memory-mapped shard, read-only. Pages are read when they are touched.

    Raises: UserError where the file is missing, is no shard, or has another size than its header
    says. Content is checked by `faults` only: it would have to be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                self.header = ShardHeader.unpack(path, stream.read(HEADER_BYTES))
                if size != self.header.file_bytes:
                    raise UserError(
                        path, None, f"holds {size} bytes, not {self.header.file_bytes}; {REMEDY}"
                    )
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise UserError(path, None, f"is missing; {REMEDY}") from None
        except OSError as error:
            raise UserError(path, None, refusal(error, "read", REMEDY)) from None
        # Plain arrays over the map: slicing np.memmap costs several times as much.
        self.tokens: Tokens = np.frombuffer(
            self._map, dtype=self.header.dtype, count=self.header.tokens, offset=HEADER_BYTES
        )
        """(tokens,) uint16 or uint32."""
        self.starts: npt.NDArray[np.uint64] = np.frombuffer(
            self._map, dtype=INDEX_DTYPE, offset=self.header.index_offset
        )
        """(documents + 1,): each document's first token, then the number of tokens."""
        # Searching uint64 for an int would convert all of it.
        self._starts = self.starts.view(np.int64)

    def document(self, index: int) -> Tokens:
        """Tokens of a document, its EOS included."""
        return self.tokens[int(self.starts[index]) : int(self.starts[index + 1])]

    def document_starts(self, first: int, length: int) -> npt.NDArray[np.int64]:
        """For tokens first … first + length − 1, the place in them where each document starts.

        Returns int64 (length,), rising; 0 for the document that the first of them is in.
        """
        # Whole numbers: right of `first` is left of the next. One search, as each costs the same.
        low, high = self._starts.searchsorted((first + 1, first + length)).tolist()
        places = np.zeros(length, dtype=np.int64)
        if low < high:
            borders = self._starts[low:high] - first
            try:
                places[borders] = borders
            except IndexError:  # they don't rise
                raise UserError(self.path, "index", f"is damaged; {REMEDY}") from None
            np.maximum.accumulate(places, out=places)
        return places

    def faults(self) -> list[str]:
        """What a full read finds wrong, as `field: fault`; empty for a good shard."""
        header, found = self.header, []
        if xxhash.xxh3_128_digest(self.tokens.data) != header.tokens_checksum:
            found.append(f"tokens: do not match their checksum; {REMEDY}")
        if xxhash.xxh3_128_digest(self.starts.data) != header.index_checksum:
            found.append(f"index: does not match its checksum; {REMEDY}")
        tokens_end = HEADER_BYTES + header.tokens * header.dtype.itemsize
        if any(self._map[tokens_end : header.index_offset]):
            found.append(f"padding: is not zero; {REMEDY}")
        return found
