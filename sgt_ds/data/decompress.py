"""Plain, gzip and zstd bytes in, decompressed pieces of bounded size out. Decides by content.

Knows no lines and no JSON. Every way in which a compressed file can be broken has a reason of its
own; what was whole before the break has been handed out by then.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Protocol

import zstandard

PIECE_BYTES = 1 << 20
_READ_BYTES = 1 << 20
# zstandard's decompressor has no limit on its output: 4 bytes may become 128 KiB, so that this much
# input becomes 128 MiB at most.
_ZSTD_READ_BYTES = 1 << 12
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = b"\x2a\x4d\x18"
_GZIP_WINDOW = 16 + zlib.MAX_WBITS


class Damage(Exception):
    """A file is broken from here on. `reason`: a fixed word; `detail`: for a person."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class Readable(Protocol):
    """What a file must offer."""

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes; none at the end."""
        ...


def decompressed(stream: Readable) -> Iterator[bytes]:
    """Pieces of at most `PIECE_BYTES`, of all gzip members or zstd frames one after another.

    Raises: Damage.
    """
    try:
        head = stream.read(_READ_BYTES)
        if not head:
            raise Damage("empty-file", "is empty")
        if head.startswith(_GZIP_MAGIC):
            yield from _gunzipped(stream, head)
        elif _starts_zstd(head):
            yield from _unzstandarded(stream, head)
        else:
            while head:
                yield head
                head = stream.read(_READ_BYTES)
    except OSError as error:
        raise Damage("unreadable", error.strerror or str(error)) from None


def _starts_zstd(head: bytes) -> bool:
    return head.startswith(_ZSTD_MAGIC) or (
        head[1:4] == _ZSTD_SKIPPABLE and 0x50 <= head[0] <= 0x5F
    )


def _gunzipped(stream: Readable, head: bytes) -> Iterator[bytes]:
    member, content = zlib.decompressobj(_GZIP_WINDOW), head
    while True:
        while content and not member.eof:
            try:
                piece = member.decompress(content, PIECE_BYTES)
            except zlib.error as error:
                text = str(error)
                wrong_sum = "incorrect data check" in text or "incorrect length check" in text
                reason = "gzip-checksum" if wrong_sum else "gzip-corrupt"
                raise Damage(reason, f"gzip: {text}") from None
            if piece:
                yield piece
            content = member.unused_data if member.eof else member.unconsumed_tail
        if member.eof:
            # Zeros behind a member are padding, as gzip itself has it.
            content = content.lstrip(b"\0")
            while len(content) < 2 and (more := stream.read(_READ_BYTES)):
                content = (content + more).lstrip(b"\0")
            if not content:
                return
            if not content.startswith(_GZIP_MAGIC):
                raise Damage(
                    "gzip-trailing-junk", "gzip: trailing bytes that are not a gzip member"
                )
            member = zlib.decompressobj(_GZIP_WINDOW)
        elif not (content := stream.read(_READ_BYTES)):
            raise Damage("gzip-truncated", "gzip: the file ends inside a member")


def _unzstandarded(stream: Readable, head: bytes) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor()
    frame, frames = decompressor.decompressobj(), 1
    for content in _pieces(stream, head):
        rest = content
        while rest:
            if frame.eof:
                frame, frames = decompressor.decompressobj(), frames + 1
            try:
                output = frame.decompress(rest)
            except zstandard.ZstdError as error:
                if frames > 1 and "Unknown frame descriptor" in str(error):
                    raise Damage(
                        "zstd-trailing-junk", "zstd: trailing bytes that are not a frame"
                    ) from None
                raise Damage("zstd-corrupt", f"zstd: {error}") from None
            for start in range(0, len(output), PIECE_BYTES):
                yield output[start : start + PIECE_BYTES]
            rest = frame.unused_data if frame.eof else b""
    if not frame.eof:
        raise Damage("zstd-truncated", "zstd: the file ends inside a frame")


def _pieces(stream: Readable, head: bytes) -> Iterator[bytes]:
    while head:
        for start in range(0, len(head), _ZSTD_READ_BYTES):
            yield head[start : start + _ZSTD_READ_BYTES]
        head = stream.read(_READ_BYTES)
