"""Preparing a set: the same bytes however the work is shared and however often it is killed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import runs
from c4_files import row, texts_of, write_c4, write_tokenizer

from sgt_ds.cli import main
from sgt_ds.data import Tokenizer, inspect, open_token_set, train_tokenizer, verify
from sgt_ds.errors import UserError

COMMAND = [sys.executable, "-m", "sgt_ds", "data", "prepare"]
SUFFIXES = (".json.gz", ".json.zst", ".json")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine files of different sizes and kinds, and a tokenizer beside them."""
    root = tmp_path_factory.mktemp("corpus")
    for number in range(9):
        texts = texts_of(40 + 60 * (number % 4), first=1000 * number)
        write_c4(root / f"c4.{number:05d}{SUFFIXES[number % 3]}", texts)
    write_tokenizer(root / "tokenizer.json")
    return root


def arguments(corpus: Path, out: Path, *more: str) -> list[str]:
    tokenizer = str(corpus / "tokenizer.json")
    options = runs.with_defaults(["--tokenizer", tokenizer, "--out", str(out)], *more)
    return [str(corpus / "c4.*"), *options]


def prepare(corpus: Path, out: Path, *more: str) -> int:
    return main(["data", "prepare", *arguments(corpus, out, "--workers", "1", *more)])


def digests(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reference")
    more = ["--holdout", "0.1", "--holdout-out", str(root / "val"), "--shard-tokens", "9000"]
    assert prepare(corpus, root / "train", *more) == 0
    assert verify(root / "train") == verify(root / "val") == []
    return root


def all_texts(corpus: Path) -> list[str]:
    return [
        text
        for number in range(9)
        for text in texts_of(40 + 60 * (number % 4), first=1000 * number)
    ]


def decoded(directory: Path) -> list[str]:
    token_set = open_token_set(directory)
    tokenizer = Tokenizer(token_set.tokenizer_file)
    found = []
    for place, entry in enumerate(token_set.manifest.shards):
        shard = token_set.shard(place)
        for index in range(entry.documents):
            ids = shard.document(index).tolist()
            assert ids[-1] == tokenizer.eos_id
            found.append(tokenizer.decode(ids[:-1]))
    return found


def test_every_document_comes_back_character_for_character(corpus: Path, reference: Path) -> None:
    held_out, kept = decoded(reference / "val"), decoded(reference / "train")
    texts = all_texts(corpus)
    assert kept == [text for text in texts if text not in set(held_out)]
    assert sorted(kept + held_out) == sorted(texts)
    # 0.1 of 1,140 documents, 5 standard deviations.
    assert abs(len(held_out) - 114) < 5 * (1140 * 0.09) ** 0.5
    manifest = open_token_set(reference / "train").manifest
    assert len(manifest.shards) > 9, "no file was cut into shards of bounded size"
    assert manifest.characters == sum(map(len, kept))


def test_holdout_goes_by_text_not_by_order_or_file(
    corpus: Path, reference: Path, tmp_path: Path
) -> None:
    texts = all_texts(corpus)
    random.Random(1).shuffle(texts)
    write_c4(tmp_path / "c4.all.json", texts)
    write_tokenizer(tmp_path / "tokenizer.json")
    more = ["--holdout", "0.1", "--holdout-out", str(tmp_path / "val")]
    assert prepare(tmp_path, tmp_path / "train", *more) == 0
    assert sorted(decoded(tmp_path / "val")) == sorted(decoded(reference / "val"))


def start(corpus: Path, root: Path, workers: int) -> subprocess.Popen[bytes]:
    more = ["--holdout", "0.1", "--holdout-out", str(root / "val"), "--shard-tokens", "9000"]
    command = [*COMMAND, *arguments(corpus, root / "train", "--workers", str(workers), *more)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("workers", [2, 7])
def test_bytes_do_not_depend_on_the_number_of_workers(
    corpus: Path, reference: Path, tmp_path: Path, workers: int
) -> None:
    process = start(corpus, tmp_path, workers)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert digests(tmp_path) == digests(reference)


@pytest.mark.network
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: install openmpi-bin")
def test_mpirun_gives_the_same_bytes_and_ends_all_ranks_at_an_error(
    corpus: Path, reference: Path, tmp_path: Path
) -> None:
    pytest.importorskip("mpi4py")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mpirun = ["mpirun", "--oversubscribe", "-n", "3", *COMMAND]
    more = ["--holdout", "0.1", "--holdout-out", str(tmp_path / "val"), "--shard-tokens", "9000"]

    def run(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*mpirun, *arguments(corpus, out, *options)],
            env={**os.environ, **as_root},
            capture_output=True,
            text=True,
            timeout=120,
        )

    done = run(tmp_path / "train", *more)
    assert done.returncode == 0, done.stderr
    assert digests(tmp_path) == digests(reference)
    failed = run(tmp_path / "other", "--max-document-bytes", "100")
    assert failed.returncode == 2
    assert "document-too-large" in failed.stderr


def test_urls_read_like_paths(corpus: Path, tmp_path: Path) -> None:
    """Through fsspec, as any remote store would be."""
    out = tmp_path / "out"
    tokenizer = ["--tokenizer", str(corpus / "tokenizer.json"), "--workers", "1"]
    url = f"file://{corpus}/c4.*"
    assert main(["data", "prepare", url, *tokenizer, "--out", str(out)]) == 0
    assert prepare(corpus, tmp_path / "local") == 0
    assert digests(out) == digests(tmp_path / "local")


@pytest.mark.parametrize("workers", [1, 2])
def test_kills_at_any_moment_leave_no_trace(
    corpus: Path, reference: Path, tmp_path: Path, workers: int
) -> None:
    """Kill -9 of the whole job at random moments; then one run to the end."""
    moments = random.Random(workers)
    records = tmp_path / "train" / ".work"
    kills = 0
    for latest in (0.0, 0.1, 0.25):  # the first at once: a quick machine needs less than the others
        process = start(corpus, tmp_path, workers)
        deadline = time.monotonic() + 60
        # Wait for work to begin, so that kills fall into it and not into Python's start.
        while not list(tmp_path.rglob(".*.tmp")) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(moments.uniform(0, latest))
        process.kill()
        kills += process.wait() == -signal.SIGKILL
        if records.exists():
            with pytest.raises(UserError, match="not a prepared set"):
                open_token_set(tmp_path / "train")
    assert kills > 0
    process = start(corpus, tmp_path, workers)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert digests(tmp_path) == digests(reference)


def test_finished_files_are_not_done_again(corpus: Path, tmp_path: Path, capsys: Any) -> None:
    broken = tmp_path / "in"
    for number in range(3):
        write_c4(broken / f"c4.{number}.json", texts_of(30 - number, first=number * 100))
    good = (broken / "c4.2.json").read_bytes()
    (broken / "c4.2.json").write_bytes(good[:-30] + b"\n")
    write_tokenizer(broken / "tokenizer.json")
    out = tmp_path / "out"
    assert prepare(broken, out) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "c4.2.json: line 28: is not JSON" in line
    assert "(not-json)" in line
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tokens")}
    assert len(before) == 2
    (broken / "c4.2.json").write_bytes(good)
    assert prepare(broken, out, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["files"], report["reused_files"], report["documents"]) == (3, 2, 87)
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tokens")}
    assert before.items() < after.items()
    # The same command on a finished set does nothing, and another one is refused.
    assert prepare(broken, out) == 0
    capsys.readouterr()
    assert prepare(broken, out, "--max-document-bytes", "1000") == 2
    assert "max_document_bytes" in capsys.readouterr().err
    # An input that was only touched is the same; one of the same size with another text is not.
    (broken / "c4.0.json").touch()
    assert prepare(broken, out) == 0
    (broken / "c4.2.json").write_bytes(good.replace(b"End.", b"end.", 1))
    assert prepare(broken, out) == 2
    assert "has changed since" in capsys.readouterr().err


def test_an_input_that_changes_between_attempts_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in"
    write_c4(source / "c4.0.json", texts_of(20))
    good = (source / "c4.0.json").read_bytes()
    write_c4(source / "c4.1.json", ["", "x"])
    write_tokenizer(source / "tokenizer.json")
    assert prepare(source, tmp_path / "out") == 2
    # Touched only: not changed. Same size, other text: changed.
    os.utime(source / "c4.0.json")
    assert prepare(source, tmp_path / "out") == 2
    assert "c4.1.json: line 1" in capsys.readouterr().err.splitlines()[-1]
    (source / "c4.0.json").write_bytes(good.replace(b"End.", b"end.", 1))
    assert prepare(source, tmp_path / "out") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "c4.0.json" in line
    assert "has changed" in line


def test_skipping_counts_lists_and_has_a_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in"
    texts = texts_of(60)
    write_c4(source / "c4.0.json", texts[:30])
    path = write_c4(source / "c4.1.json.gz", texts[30:])
    path.write_bytes(path.read_bytes() + b"junk")
    with (source / "c4.0.json").open("ab") as stream:
        stream.write(row(None) + b"\xff\n" + row(None))
    write_tokenizer(source / "tokenizer.json")
    out = tmp_path / "out"
    assert prepare(source, out, "--on-error", "skip") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    # Even a second file without a fault could not fix it: told after the first.
    assert "3 faults, with 30 good documents in 1 of 2 files: 0.0909 is above" in line
    assert len(list(out.glob("*.tokens"))) == 1
    assert prepare(source, out, "--on-error", "skip", "--max-bad-fraction", "0.055") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "c4.0.json: line 31" in line
    assert "4 faults, with 60 good documents: 0.0625 is above --max-bad-fraction 0.055" in line
    # Raising the limit goes on: nothing is read again.
    raised = ["--on-error", "skip", "--max-bad-fraction", "0.07"]
    assert prepare(source, out, *raised, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["reused_files"] == 2
    assert report["skipped"] == {
        "gzip-trailing-junk": 1, "invalid-utf8": 1, "text-not-a-string": 2
    }  # fmt: skip
    listed = [json.loads(line) for line in (out / "skipped.jsonl").read_text().splitlines()]
    assert [(entry["file"], entry["line"]) for entry in listed] == [
        ("c4.0.json", 31), ("c4.0.json", 32), ("c4.0.json", 33), ("c4.1.json.gz", 31)
    ]  # fmt: skip
    assert decoded(out) == list(texts)
    assert verify(out) == []


def test_an_interruption_does_not_say_that_the_same_command_continues(
    corpus: Path, tmp_path: Path
) -> None:
    command = [*COMMAND, *arguments(corpus, tmp_path / "out", "--workers", "2")]
    # As at a terminal: to the whole group, and none of it may ignore it.
    process = subprocess.Popen(
        ["env", "--default-signal=INT", *command],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        while not list((tmp_path / "out").glob("*.tokens")):
            assert process.poll() is None
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGINT)
        told = process.communicate(timeout=60)[1].splitlines()[-1]
    finally:
        process.kill()
    kept = "finished files are kept, and the same command continues"
    assert (process.returncode, told) == (130, f"sgt-ds: interrupted; {kept}")
    assert prepare(corpus, tmp_path / "out") == 0


def test_no_space_left_is_told_and_finished_files_stay(corpus: Path, tmp_path: Path) -> None:
    """The kernel refuses to let a file grow: for the program the same as a full disk."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    command = [*COMMAND, *arguments(corpus, tmp_path / "out", "--workers", "1")]
    (tmp_path / "out").mkdir()
    process = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2
    assert "cannot be written (File too large)" in process.stderr
    assert "Traceback" not in process.stderr
    assert not list((tmp_path / "out").rglob(".*.tmp"))
    assert prepare(corpus, tmp_path / "out") == 0
    assert verify(tmp_path / "out") == []


def test_two_preparations_of_one_set_do_not_mix(corpus: Path, tmp_path: Path) -> None:
    first = start(corpus, tmp_path, 1)
    while not (tmp_path / "train" / ".work" / "job.json").exists():
        time.sleep(0.005)
    first.send_signal(signal.SIGSTOP)
    try:
        second = start(corpus, tmp_path, 1)
        _, errors = second.communicate(timeout=60)
        assert second.returncode == 2
        assert b"being prepared by another process" in errors
    finally:
        first.send_signal(signal.SIGCONT)
    assert first.wait(timeout=60) == 0


def _delete(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_refused_start_that_prepared_nothing_blocks_the_right_one(
    corpus: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "README.md").write_text("# Not this\n")
    out, val = tmp_path / "out", tmp_path / "val"
    tokenizer = str(corpus / "tokenizer.json")
    model = tmp_path / "t.model"
    train_tokenizer([str(corpus / "c4.00000.json.gz")], 400, model)
    # The larger file first, of which shards are done when the other one is refused.
    two = [str(tmp_path / "README.md"), str(corpus / "c4.00001.json.zst")]
    held = ["--holdout", "0.3", "--holdout-out", str(val), "--shard-tokens", "500"]
    rest = ["--out", str(out), "--workers", "1"]
    for wrong in ([two[0]], [two[0], "--on-error", "skip"], two):
        command = ["data", "prepare", *wrong, "--tokenizer", str(model), *held, *rest]
        assert main(command) == 2
        assert "README.md" in capsys.readouterr().err.splitlines()[-1]
        if wrong is two:  # by hand: as after a kill in mid-file
            for record in out.glob("*/[0-9]*.json"):
                record.unlink()
            assert len(list(val.glob("*.tokens"))) > 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tokenizer.json").write_text("mine")
    held[3] = str(tmp_path / "mine")
    assert main(["data", "prepare", *two, "--tokenizer", tokenizer, *held, *rest]) == 2
    assert "mine: is not empty" in capsys.readouterr().err
    right = ["data", "prepare", str(corpus / "c4.00000.json.gz"), "--tokenizer", tokenizer, *rest]
    assert main(right) == 0
    assert main(["data", "verify", str(out)]) == 0
    assert list(val.iterdir()) == []
    assert main(["data", "prepare", *two, "--tokenizer", tokenizer, *rest]) == 2
    told = capsys.readouterr().err
    assert "holds a set prepared with different inputs" in told
    assert told.endswith("; use the same, give another --out, or remove it\n")


@pytest.mark.parametrize("damage", [_delete, _cut, _flip])
@pytest.mark.parametrize("name", ["00001-000.tokens", "tokenizer.json", "manifest.json"])
def test_verify_names_the_damaged_file(
    corpus: Path, tmp_path: Path, capsys: Any, damage: Callable[[Path], None], name: str
) -> None:
    out = tmp_path / "out"
    assert prepare(corpus, out) == 0
    assert main(["data", "verify", str(out)]) == 0
    damage(out / name)
    capsys.readouterr()
    assert main(["data", "verify", str(out)]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert name in line
    assert line.count("again") <= 2, "the remedy stands twice"


def test_inspecting_a_damaged_document_is_a_traceback(
    corpus: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    model = str(tmp_path / "t.model")
    train_tokenizer([str(corpus / "c4.00000.json.gz")], 400, Path(model))
    assert main(["data", "prepare", str(corpus / "c4.0000[01]*"), "--out", str(out),
                 "--tokenizer", model, "--workers", "1"]) == 0  # fmt: skip
    shard = out / "00000-000.tokens"
    content = bytearray(shard.read_bytes())
    content[129] = 255
    shard.write_bytes(content)
    capsys.readouterr()
    assert main(["data", "inspect", str(out)]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"sgt-ds: {shard}: tokens: holds id 65")
    assert f"`sgt-ds data verify {out}`" in line
    assert line.count("\n") == 1


def test_verify_names_foreign_files_and_inspect_shows_the_set(
    reference: Path, corpus: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    assert prepare(corpus, out) == 0
    (out / "00099-000.tokens").write_bytes(b"x")
    assert verify(out) == [f"{out / '00099-000.tokens'}: is not part of this set; remove it"]
    found = inspect(reference / "train", sample=3, sample_tokens=10_000)
    kept = decoded(reference / "train")
    assert found["sample"]["text"].removesuffix("<|endoftext|>") == kept[3]
    assert sum(entry["documents"] for entry in found["document_lengths"]) == len(kept)
    capsys.readouterr()
    assert main(["data", "inspect", str(reference / "train"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == len(kept)


def test_bos_eos_and_sentencepiece(corpus: Path, tmp_path: Path) -> None:
    train_tokenizer([str(corpus / "c4.00000*")], 400, tmp_path / "tokenizer.model")
    texts = ["One.", "Two </s> three."]
    write_c4(tmp_path / "c4.json", texts)
    arguments = ["--tokenizer", str(tmp_path / "tokenizer.model"), "--out", str(tmp_path / "out")]
    inputs = str(tmp_path / "c4.json")
    assert main(["data", "prepare", inputs, *arguments, "--bos", "--workers", "1"]) == 0
    shard = open_token_set(tmp_path / "out").shard(0)
    tokenizer = Tokenizer(tmp_path / "out" / "tokenizer.model")
    for index, text in enumerate(texts):
        ids = shard.document(index).tolist()
        assert (ids[0], ids[-1]) == (1, 2)
        assert tokenizer.decode(ids[1:-1]) == text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--holdout", "0.5"], "--holdout-out"),
        (["--holdout", "1.5", "--holdout-out", "x"], "'1.5' is not a number from 0 to 1"),
        (["--out", "/proc/version"], "is a file"),
        (["--out", "/proc/none"], "cannot be written"),
        (["--bos"], "has no BOS"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(
    corpus: Path, tmp_path: Path, capsys: Any, more: Sequence[str], words: str
) -> None:
    try:
        status: object = prepare(corpus, tmp_path / "out", *more)
    except SystemExit as end:  # argparse's own
        status = end.code
    assert status == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert words in line
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    assert prepare(corpus, tmp_path / "mine") == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
