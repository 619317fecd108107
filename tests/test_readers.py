"""C4 files: every kind of damage is told by file, line and reason; all else is read whole."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from c4_files import row, texts_of, write_c4
from hypothesis import given, settings
from hypothesis import strategies as st

from sgt_ds.data.decompress import Damage
from sgt_ds.data.inputs import HashingReader, expand_inputs
from sgt_ds.data.readers import Document, Fault, read_documents
from sgt_ds.errors import UserError

TEXTS = list(texts_of(40))
ROWS = b"".join(row(text) for text in TEXTS)
GZIPPED = gzip.compress(ROWS, mtime=0)
ZSTANDARDED = zstandard.ZstdCompressor(write_checksum=True).compress(ROWS)


def read(content: bytes, limit: int = 4_000_000) -> list[Document | Fault]:
    return list(read_documents(io.BytesIO(content), limit))


def texts(found: list[Document | Fault]) -> list[str]:
    return [item.text for item in found if isinstance(item, Document)]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.jsonl.zst", "gzip-named.json"])
def test_formats_are_told_by_content(tmp_path: Path, name: str) -> None:
    path = write_c4(tmp_path / name, TEXTS)
    if name == "gzip-named.json":
        path.write_bytes(GZIPPED)
    assert texts(read(path.read_bytes())) == TEXTS


def test_members_frames_padding_and_skippable_frames_are_all_read() -> None:
    skippable = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    assert texts(read(GZIPPED + GZIPPED + b"\0" * 700)) == TEXTS * 2
    assert texts(read(ZSTANDARDED + skippable + ZSTANDARDED)) == TEXTS * 2
    assert texts(read(skippable + ZSTANDARDED)) == TEXTS
    # A frame of one megabyte-sized piece after another, without sizes in its header.
    streamed = zstandard.ZstdCompressor().compressobj()
    assert texts(read(streamed.compress(ROWS * 60) + streamed.flush())) == TEXTS * 60


def test_harmless_oddities_are_no_damage() -> None:
    assert texts(read(b"\xef\xbb\xbf" + ROWS)) == TEXTS
    assert texts(read(ROWS.replace(b"\n", b"\r\n"))) == TEXTS
    assert texts(read(ROWS.removesuffix(b"\n"))) == TEXTS
    assert texts(read(ROWS + b"\n \n")) == TEXTS
    assert texts(
        read(row("a\ud83d\ude42b".encode("utf-16", "surrogatepass").decode("utf-16")))
    ) == ["a🙂b"]


@given(
    st.lists(
        st.text(
            st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1
        ).filter(str.strip),
        max_size=8,
    )
)
@settings(max_examples=100, deadline=None)
def test_any_text_comes_back_as_it_was(wanted: list[str]) -> None:
    content = b"".join(row(text) for text in wanted)
    raw = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in wanted).encode()
    assert texts(read(gzip.compress(content))) == wanted == texts(read(raw or b"\n"))


LINE_DAMAGE = [
    (b'{"text": "caf\xe9"}\n', "invalid-utf8"),
    (b"\xff\xfe{\x00\n", "invalid-utf8"),
    (b'{"text": "cut o\n', "not-json"),
    (b"\0\0\0\0\n", "not-json"),
    (b"[" * 100_000 + b"\n", "not-json"),
    (b'{"n": ' + b"9" * 5000 + b"}\n", "not-json"),
    (b'["text"]\n', "not-an-object"),
    (b'{"content": "x"}\n', "no-text"),
    (b'{"text": null}\n', "text-not-a-string"),
    (b'{"text": 7}\n', "text-not-a-string"),
    (b'{"text": ""}\n', "empty-document"),
    (b'{"text": " \\n"}\n', "empty-document"),
    (b'{"text": "a\\u0000b"}\n', "nul"),
    (b'{"text": "a\\ud800b"}\n', "lone-surrogate"),
    (row("x" * 20_001), "document-too-large"),
    (b'{"text": "' + b"x" * 3_000_000 + b'"}\n', "line-too-long"),
]


@pytest.mark.parametrize(("line", "reason"), LINE_DAMAGE, ids=lambda value: str(value)[:24])
def test_a_damaged_line_is_named_and_the_rest_is_read(line: bytes, reason: str) -> None:
    before, after = row(TEXTS[0]), row(TEXTS[1])
    for pack in (bytes, gzip.compress):
        found = read(pack(before + line + after), limit=20_000)
        assert texts(found) == TEXTS[:2]
        assert isinstance(found[1], Fault)
        assert (found[1].line, found[1].reason, found[1].ends_file) == (2, reason, False)
    last = read(before + line.removesuffix(b"\n"), limit=20_000)
    assert isinstance(last[1], Fault)
    assert last[1].reason == reason


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :]


FILE_DAMAGE = [
    (b"", {"empty-file"}),
    (GZIPPED[:-9], {"gzip-truncated"}),
    (GZIPPED[: len(GZIPPED) // 2], {"gzip-truncated"}),
    (GZIPPED[:5], {"gzip-truncated"}),
    (GZIPPED + b"junk", {"gzip-trailing-junk"}),
    (GZIPPED + b"\0" * 9 + b"junk", {"gzip-trailing-junk"}),
    (GZIPPED + GZIPPED[:-3], {"gzip-truncated"}),
    (flipped(GZIPPED, len(GZIPPED) - 6), {"gzip-checksum"}),
    (flipped(GZIPPED, len(GZIPPED) // 2), {"gzip-corrupt", "gzip-checksum"}),
    (ZSTANDARDED[:-1], {"zstd-truncated"}),
    (ZSTANDARDED[: len(ZSTANDARDED) // 2], {"zstd-truncated"}),
    (ZSTANDARDED + ZSTANDARDED[:6], {"zstd-truncated"}),
    (ZSTANDARDED + b"junk and more", {"zstd-trailing-junk"}),
    (flipped(ZSTANDARDED, len(ZSTANDARDED) - 1), {"zstd-corrupt"}),
    (ZSTANDARDED + flipped(ZSTANDARDED, 4), {"zstd-corrupt", "zstd-truncated"}),
]


@pytest.mark.parametrize(("content", "reasons"), FILE_DAMAGE, ids=range(len(FILE_DAMAGE)))
def test_a_broken_file_is_named_behind_what_was_whole(content: bytes, reasons: set[str]) -> None:
    found = read(content)
    last = found[-1]
    assert isinstance(last, Fault)
    assert last.reason in reasons
    assert last.ends_file
    whole = texts(found)
    assert whole == (TEXTS * 2)[: len(whole)]
    assert last.line == len(whole) + 1


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json.gz").mkdir()
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.json")
    reasons = {}
    for file in expand_inputs([str(tmp_path / "*")]):
        with pytest.raises(Damage) as caught:
            HashingReader(file)
        reasons[file.name] = caught.value.reason
    assert reasons == {
        "gone.json": "unreadable",
        "pipe.json": "not-a-file",
        "x.json.gz": "not-a-file",
    }
    # A real file that opens and cannot be read: a process's own memory at address 0.
    (memory,) = expand_inputs(["/proc/self/mem"])
    (fault,) = read_documents(HashingReader(memory))
    assert isinstance(fault, Fault)
    assert fault.reason == "unreadable"


def test_patterns_name_each_file_once_and_in_order(tmp_path: Path) -> None:
    for name in ("b/1.json", "a/2.json", "a/1.json", "a/[x].json"):
        write_c4(tmp_path / name, TEXTS[:1])
    patterns = [
        str(tmp_path / "b/*.json"),
        str(tmp_path / "**/?.json"),
        str(tmp_path / "a/[x].json"),
    ]
    assert [file.name for file in expand_inputs(patterns)] == [
        "b/1.json", "a/1.json", "a/2.json", "a/[x].json"
    ]  # fmt: skip
    with pytest.raises(UserError, match="no such file"):
        expand_inputs([str(tmp_path / "*.zst")])


BOMBS = {
    # A gigabyte without a newline, of frames of a megabyte each.
    "zstd": "zstandard.compress(b'x' * (1 << 20)) * 1024",
    # One frame, four bytes for 128 KiB: the worst ratio that the format has.
    "zstd-frame": "b''.join([c.compress(bytes(1 << 20)) for _ in range(1024)]) + c.flush()",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_line_of_a_gigabyte_stays_within_bounded_memory(kind: str) -> None:
    program = (
        "import io, zstandard\n"
        "from sgt_ds.data.readers import read_documents\n"
        "c = zstandard.ZstdCompressor(level=1).compressobj()\n"
        f"content = {BOMBS[kind]}\n"
        "from sgt_ds.memory import peak_resident_bytes\n"
        "before = peak_resident_bytes()\n"
        "found = list(read_documents(io.BytesIO(content)))\n"
        "print(found[0].reason, (peak_resident_bytes() - before) >> 20)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120
    ).stdout.split()
    assert output[0] == "line-too-long"
    assert int(output[1]) < 600, "MiB"
