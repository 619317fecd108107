"""Each way in which a C4 file can be broken, through `data prepare`: told in one line, or skipped."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import zstandard
from c4_files import row, texts_of, write_c4, write_tokenizer

from sgt_ds.cli import main
from sgt_ds.data import Tokenizer, open_token_set, verify

GOOD = list(texts_of(12))
FIRST, LAST = row(GOOD[0]), row(GOOD[1])
ROWS = b"".join(row(text) for text in GOOD)
GZIPPED = gzip.compress(ROWS, mtime=0)
ZSTANDARDED = zstandard.ZstdCompressor(write_checksum=True).compress(ROWS)
LIMIT = 20_000

# What stands between two good lines, and what it is called.
LINES = {
    "invalid UTF-8": (b'{"text": "caf\xe9"}', "invalid-utf8"),
    "not JSON": (b'{"text": "cut o', "not-json"),
    "JSON without text": (b'{"content": "x"}', "no-text"),
    "text null": (b'{"text": null}', "text-not-a-string"),
    "text a number": (b'{"text": 7}', "text-not-a-string"),
    "empty document": (b'{"text": ""}', "empty-document"),
    "over --max-document-bytes": (row("x" * (LIMIT + 1)).strip(), "document-too-large"),
    "NUL bytes": (b"\0\0\0", "not-json"),
    "NUL in a text": (b'{"text": "a\\u0000b"}', "nul"),
    "lone surrogate": (b'{"text": "a\\ud800b"}', "lone-surrogate"),
    "two million brackets": (b'{"text": "a", "x": [' + b"[]," * (1 << 20), "line-too-long"),
}
# Whole files: content, reason, good documents before it, line at which it is told.
FILES = {
    "truncated gzip": (GZIPPED[:-9], "gzip-truncated", 12, 13),
    "gzip with trailing junk": (GZIPPED + b"junk", "gzip-trailing-junk", 12, 13),
    "CRC error": (
        GZIPPED[:-6] + bytes([GZIPPED[-6] ^ 1]) + GZIPPED[-5:], "gzip-checksum", 0, 1
    ),  # a checksum accuses all that was unpacked with it
    "zstd with a bad frame": (ZSTANDARDED + ZSTANDARDED[:9] + b"\xff" * 40, "zstd-corrupt", 12, 13),
    "truncated zstd": (ZSTANDARDED[:-1], "zstd-truncated", 12, 13),
    "empty file": (b"", "empty-file", 0, 1),
}  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A good file, larger than any other so that it is done first, and a tokenizer."""
    write_c4(tmp_path / "in" / "a-good.json", texts_of(600, first=100))
    write_tokenizer(tmp_path / "tokenizer.json")
    return tmp_path / "in"


def prepare(source: Path, *more: str) -> int:
    root = source.parent
    where = ["--tokenizer", str(root / "tokenizer.json"), "--out", str(root / "out")]
    limits = ["--max-document-bytes", str(LIMIT), "--workers", "1"]
    return main(["data", "prepare", str(source / "*"), *where, *limits, *more])


def decoded(directory: Path, source: str) -> list[str]:
    token_set = open_token_set(directory)
    tokenizer = Tokenizer(token_set.tokenizer_file)
    return [
        tokenizer.decode(token_set.shard(place).document(index).tolist()[:-1])
        for place, entry in enumerate(token_set.manifest.shards)
        if entry.source == source
        for index in range(entry.documents)
    ]


def check(source: Path, name: str, reason: str, place: str, kept: list[str], capsys: Any) -> None:
    """Stopping names the fault and keeps the good file; skipping keeps everything else."""
    out = source.parent / "out"
    assert prepare(source) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"sgt-ds: {source / name}: {place}")
    mend = "make it readable" if reason == "unreadable" else "fix the file"
    assert f"({reason}); {mend}, or skip" in line
    with contextlib.suppress(FileNotFoundError):
        assert not list(out.glob("**/.*.tmp"))
    assert not (out / "manifest.json").exists()
    finished = (out / "00000-000.tokens").stat()
    assert prepare(source, "--on-error", "skip", "--json") == 2, "1 of 600 is above 0.001"
    told = capsys.readouterr().err.splitlines()[-1]
    assert "above --max-bad-fraction 0.001" in told
    assert " is the first of 1 fault, with " in told
    assert prepare(source, "--on-error", "skip", "--max-bad-fraction", "0.01", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["skipped"] == {reason: 1}
    listed = [json.loads(line) for line in Path(report["skipped_list"]).read_text().splitlines()]
    assert [(entry["file"], entry["reason"]) for entry in listed] == [(name, reason)]
    assert (out / "00000-000.tokens").stat().st_mtime_ns == finished.st_mtime_ns, "done again"
    assert decoded(out, name) == kept
    assert report["documents"] == 600 + len(kept)
    assert report["characters_per_token"] == report["characters"] / report["tokens"]
    assert verify(out) == []


@pytest.mark.parametrize("name", LINES)
def test_a_broken_line_is_not_told_or_takes_others_along(
    source: Path, capsys: Any, name: str
) -> None:
    line, reason = LINES[name]
    (source / "b.json.gz").write_bytes(gzip.compress(FIRST + line + b"\n" + LAST))
    check(source, "b.json.gz", reason, "line 2: ", GOOD[:2], capsys)


@pytest.mark.parametrize("name", FILES)
def test_a_broken_file_is_not_told_or_loses_what_was_whole(
    source: Path, capsys: Any, name: str
) -> None:
    content, reason, whole, line = FILES[name]
    (source / "b.json.gz").write_bytes(content)
    check(source, "b.json.gz", reason, f"line {line}: ", GOOD[:whole], capsys)


def test_crlf_and_a_byte_order_mark_are_damage(source: Path, capsys: Any) -> None:
    (source / "b.json").write_bytes(b"\xef\xbb\xbf" + ROWS.replace(b"\n", b"\r\n"))
    assert prepare(source, "--json") == 0
    assert json.loads(capsys.readouterr().out)["skipped"] == {}
    assert decoded(source.parent / "out", "b.json") == GOOD


def test_a_directory_named_like_a_file_is_a_traceback(source: Path, capsys: Any) -> None:
    (source / "x.json.gz").mkdir()
    check(source, "x.json.gz", "not-a-file", "is a directory", [], capsys)


def test_a_file_that_may_not_be_read_is_a_traceback(tmp_path: Path, capsys: Any) -> None:
    root = Path("/tmp") / f"sgt-ds-unreadable-{os.getpid()}"  # nobody may enter pytest's own
    root.mkdir(mode=0o777)
    try:
        root.chmod(0o777)
        source = root / "in"
        write_c4(source / "a-good.json", texts_of(600, first=100))
        write_tokenizer(root / "tokenizer.json")
        write_c4(source / "x.json", GOOD).chmod(0)
        with runs.nobody():
            check(source, "x.json", "unreadable", "Permission denied", [], capsys)
    finally:
        subprocess.run(["rm", "-rf", root], check=True)


def gigabyte_line(path: Path) -> None:
    middle = gzip.compress(b"x" * (1 << 20)) * 1024
    path.write_bytes(gzip.compress(FIRST + b'{"text": "') + middle + gzip.compress(b'"}\n' + LAST))


def worst_objects(path: Path) -> None:
    """The largest line that may hold a document, full of what Python makes most of."""
    path.write_bytes(FIRST + b'{"text": "a", "x": [' + b'{"":0},' * 3_400_000 + b"0]}\n" + LAST)


def largest_document(path: Path) -> None:
    """One word of 4 MB, of characters that take four bytes and, escaped, twelve."""
    path.write_bytes(FIRST + row("🙂" * 999_999) + LAST)


@pytest.mark.parametrize(
    ("write", "documents"),
    [(gigabyte_line, 2), (worst_objects, 2), (largest_document, 3)],
)
def test_a_worker_takes_a_gigabyte_for_some_input(
    tmp_path: Path, write: Callable[[Path], None], documents: int
) -> None:
    write(tmp_path / "c4.json.gz")
    write_tokenizer(tmp_path / "tokenizer.json")
    program = (
        "import sys\n"
        "from sgt_ds.cli import main\n"
        "from sgt_ds.memory import peak_resident_bytes\n"
        "status = main(sys.argv[1:])\n"
        "print(peak_resident_bytes() >> 20, file=sys.stderr)\n"
        "sys.exit(status)\n"
    )
    command = ["data", "prepare", tmp_path / "c4.json.gz", "--out", tmp_path / "out", "--json"]
    command += ["--tokenizer", tmp_path / "tokenizer.json", "--workers", "1"]
    done = subprocess.run(
        [sys.executable, "-c", program, *command, "--on-error", "skip", "--max-bad-fraction", "1"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["documents"] == documents
    assert int(done.stderr.splitlines()[-1]) < 1000, "MiB"


def test_the_list_of_faults_grows_with_the_input(source: Path, capsys: Any) -> None:
    """All are counted; a thousand of each file are listed, and held in memory."""
    (source / "b.json").write_bytes((row("a") + b'{"text": 7}\n') * 1500)
    assert prepare(source, "--on-error", "skip", "--max-bad-fraction", "0.5", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["skipped"] == {"text-not-a-string": 1500}
    assert len(Path(report["skipped_list"]).read_text().splitlines()) == 1000
    assert open_token_set(source.parent / "out").manifest.sources[1].skipped == report["skipped"]
