"""Tokenizer files: text comes back as it was, and text never turns into control."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
from c4_files import story, texts_of, write_c4, write_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgt_ds.cli import main
from sgt_ds.data import Tokenizer, train_tokenizer
from sgt_ds.errors import UserError
from sgt_ds.files import sha256_of


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    corpus = write_c4(root / "corpus.json.gz", texts_of(200))
    (root / "link").symlink_to(root / "tokenizer.model")
    trained = train_tokenizer([str(corpus)], 400, root / "link")
    assert trained.sha256 == sha256_of(root / "tokenizer.model")
    return {
        "sentencepiece": root / "tokenizer.model",
        "huggingface": write_tokenizer(root / "tokenizer.json"),
        "corpus": corpus,
    }


KINDS = ["sentencepiece", "huggingface"]


@pytest.mark.parametrize("kind", KINDS)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0▁")))
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_decoding_gives_the_text_back(files: dict[str, Path], kind: str, text: str) -> None:
    tokenizer = Tokenizer(files[kind])
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint32
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_spelt_in_a_text_are_text(files: dict[str, Path], kind: str) -> None:
    tokenizer = Tokenizer(files[kind])
    text = "a</s> <s><|endoftext|>b<unk><|padding|>"
    special = {tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id}
    ids = tokenizer.encode(text)
    assert not special & set(ids.tolist())
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_special_where_asked_for(files: dict[str, Path]) -> None:
    tokenizer = Tokenizer(files["huggingface"], special_tokens=True)
    assert tokenizer.encode("a<|endoftext|>b").tolist()[1] == tokenizer.eos_id
    with pytest.raises(UserError, match="--special-tokens"):
        Tokenizer(files["sentencepiece"], special_tokens=True)


def test_ids_equal_those_of_the_bare_libraries(files: dict[str, Path]) -> None:
    texts = [story(seed, words=300) for seed in range(5)]
    bare = tokenizers.Tokenizer.from_file(str(files["huggingface"]))
    expected = [encoding.ids for encoding in bare.encode_batch(texts)]
    assert [ids.tolist() for ids in Tokenizer(files["huggingface"]).encode_batch(texts)] == expected
    piece = sentencepiece.SentencePieceProcessor(model_file=str(files["sentencepiece"]))
    found = Tokenizer(files["sentencepiece"])
    assert [ids.tolist() for ids in found.encode_batch(texts)] == piece.encode(texts)
    assert (found.vocab_size, found.eos_id, found.bos_id) == (400, piece.eos_id(), piece.bos_id())


def test_training_depends_on_the_documents_alone(files: dict[str, Path], tmp_path: Path) -> None:
    """Not on their order, nor on how they are cut into files and compressed."""
    texts = list(texts_of(200))
    write_c4(tmp_path / "2.json", texts[150:] + texts[20:150])
    write_c4(tmp_path / "1.json.zst", texts[:20])
    again = train_tokenizer([str(tmp_path / "*.json*")], 400, tmp_path / "again.model")
    assert (tmp_path / "again.model").read_bytes() == files["sentencepiece"].read_bytes()
    assert again.documents == again.sampled_documents == 200
    few = train_tokenizer([str(files["corpus"])], 400, tmp_path / "few.model", sample_bytes=20_000)
    assert few.sampled_bytes <= 20_000
    assert 20 < few.sampled_documents < 60
    assert few.documents == 200


def test_a_truncation_or_padding_left_in_a_file_is_ignored(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    plain = Tokenizer(path)
    changed = tokenizers.Tokenizer.from_file(str(path))
    changed.enable_truncation(4)
    changed.enable_padding(length=50)
    changed.save(str(tmp_path / "changed.json"))
    text = story(1)
    assert Tokenizer(tmp_path / "changed.json").encode(text).tolist() == plain.encode(text).tolist()


def test_bad_tokenizer_input_is_one_line_and_exit_2(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.json").write_text('{"version": "1.0"}')
    (tmp_path / "bad.model").write_bytes(b"\x0a\x0bnonsense")
    corpus, out = str(files["corpus"]), str(tmp_path / "out")
    for name, words in (
        ("bad.json", "tokenizers file"),
        ("bad.model", "tokenizers file; give a tokenizer.model or a tokenizer.json"),
        ("no", "no such"),
    ):
        arguments = ["data", "prepare", corpus, "--tokenizer", str(tmp_path / name), "--out", out]
        assert main(arguments) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        assert words in line
    arguments = ["--tokenizer", str(files["huggingface"]), "--out", out]
    assert main(["data", "prepare", corpus, *arguments, "--eos", "<end>"]) == 2
    assert "--eos" in capsys.readouterr().err


def test_a_remedy_is_told_that_the_command_has_not(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"text": ""}\n')
    train = ["--vocab-size", "400", "--out", str(tmp_path / "x.model")]
    prepare = ["--tokenizer", str(files["huggingface"]), "--out", str(tmp_path / "out")]
    assert main(["tokenizer", "train", str(bad), *train]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith("(empty-document); fix the file, or leave it out of the inputs")
    for command in (["tokenizer", "train", *train], ["data", "prepare", *prepare]):
        assert main([*command, f"{tmp_path}/"]) == 2
        told = f"sgt-ds: {tmp_path}/: is a folder; give a glob, e.g. '{tmp_path}/*.json.gz'\n"
        assert capsys.readouterr().err == told


def test_training_a_tokenizer_replaces_another_that_shards_may_need(
    files: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, link = tmp_path / "x.model", tmp_path / "link"
    out.write_bytes(b"another")
    link.symlink_to(out)
    for path in (out, link):
        train = ["tokenizer", "train", str(tmp_path / "no input"), "--out", str(path)]
        assert main([*train, "--vocab-size", "400"]) == 2
        told = f"sgt-ds: {path}: --out: exists already; give another --out, or remove it\n"
        assert capfd.readouterr().err == told
    assert out.read_bytes() == b"another"
    # What stdout leads to is continued; nothing of it is lost.
    command = ["tokenizer", "train", str(files["corpus"]), "--vocab-size", "400", "--json"]
    with out.open("ab") as log:
        subprocess.run(
            [sys.executable, "-m", "sgt_ds", *command, "--out", "/dev/stdout"],
            stdout=log,
            check=True,
        )
    assert out.read_bytes().startswith(b"another")
    assert b'"sampled_documents"' in out.read_bytes()


def test_the_size_of_vocabulary_that_is_told_would_not_do(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.model"

    def refusal(size: int) -> str:
        train = ["tokenizer", "train", str(files["corpus"]), "--out", str(out)]
        status = main([*train, "--vocab-size", str(size)])
        line = capsys.readouterr().err.splitlines()[-1]
        assert (status == 2) is not out.exists()
        out.unlink(missing_ok=True)
        return line if status else ""

    for size, told, step in ((1, r"give (\d+) or more", -1), (900_000, r"give (\d+) or less", 1)):
        found = re.search(rf"--vocab-size: {size} .*{told}", refusal(size))
        assert found
        assert not refusal(int(found[1]))
        assert refusal(int(found[1]) + step)
