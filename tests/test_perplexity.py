"""Perplexity held against the model in float64, one window at a time, and transformers' own loss."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import task_rows
import torch
from made_checkpoints import write_checkpoint
from task_rows import POSITIONS
from token_sets import write_token_set
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from sgt_ds.cli import main
from sgt_ds.config import ModelConfig
from sgt_ds.errors import UserError
from sgt_ds.evaluation import streams_of
from sgt_ds.evaluation.perplexity import windows
from sgt_ds.inference import load_scored_model
from sgt_ds.model import Transformer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task_rows.write_model(tmp_path_factory.mktemp("models") / "llama", loops=False)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Some longer than four times the trained length, with letters of two bytes."""
    generator = np.random.default_rng(1)
    return [" ".join(generator.choice(task_rows.WORDS, size)) for size in (90, 700, 3, 41)]


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def measured(
    capsys: pytest.CaptureFixture[str], folder: Path, data: Path, *flags: str
) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["eval", "perplexity", str(folder), str(data), "--json", *flags]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["windows"]
    return rows


def nats(model: Any, row: list[int], window: int, stride: int) -> list[float]:
    """Loss of each token but the first, in float64: a window for each group of `stride` tokens."""
    losses: list[float] = []
    while len(losses) < len(row) - 1:
        size = window if not losses else stride
        end = min(len(losses) + size, len(row) - 1)
        begin = max(0, end - window)
        ids = torch.tensor([row[begin : end + 1]])
        with torch.no_grad():
            log_probabilities = model(ids[:, :-1]).logits.log_softmax(-1)
        each = -log_probabilities[0].gather(-1, ids[0, 1:, None]).squeeze(-1)
        losses += each[len(losses) - end :].tolist()
    return losses


def test_every_token_is_predicted_once_behind_as_much_as_fits() -> None:
    for tokens, window, stride in ((2, 5, 5), (23, 5, 5), (23, 5, 2), (24, 7, 1), (6, 5, 3)):
        predicted = []
        for begin, end, scored in windows(tokens, window, stride):
            assert end - begin == min(window, end)
            predicted += range(end - scored + 1, end + 1)
        assert predicted == list(range(1, tokens))
    assert list(windows(1, 5, 5)) == []


def test_windows_part_from_the_harnesss() -> None:
    harness = pytest.importorskip("lm_eval.utils", reason="needs lm-eval")
    for size, window in ((3, 5), (5, 5), (23, 5), (25, 5), (26, 5)):
        row = list(range(100, 101 + size))  # the first one is the prefix
        theirs = harness.get_rolling_token_windows(row[1:], row[0], window, 1)
        ours = [
            (row[begin:end], row[end - scored + 1 : end + 1])
            for begin, end, scored in windows(len(row), window, window)
        ]
        assert ours == [(list(inputs), list(targets)) for inputs, targets in theirs]


@pytest.mark.parametrize("stride", [POSITIONS, 40])
def test_a_sliding_window_drops_or_repeats_tokens(
    folder: Path, jsonl: Path, texts: list[str], stride: int, capsys: pytest.CaptureFixture[str]
) -> None:
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    row = [0]
    for text in texts:
        row += [*tokenizer.encode(text), 0]
    rows = measured(capsys, folder, jsonl, "--extrapolate", "--stride", str(stride))
    assert [each["window"] for each in rows] == [POSITIONS * times for times in (1, 2, 3, 4)]
    size = sum(len(text.encode()) for text in texts)
    for times, found in enumerate(rows, start=1):
        losses = nats(model, row, times * POSITIONS, times * stride)
        mean = math.fsum(losses) / len(losses)
        assert found["tokens"] == len(losses) == len(row) - 1
        assert found["loss"] == pytest.approx(mean, rel=1e-6)
        assert found["perplexity"] == pytest.approx(math.exp(mean), rel=1e-5)
        # Of the text alone: what is between documents has no bytes.
        text = [loss for loss, token in zip(losses, row[1:], strict=True) if token != 0]
        bits = math.fsum(text) / math.log(2) / size
        assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
        assert (found["beyond_loss"] is None) == (times == 1)


def test_texts_apart_differ_from_transformers_own_loss(
    folder: Path, jsonl: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([[0, *tokenizer.encode(text)]])
        with torch.no_grad():
            total += float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    (found,) = measured(capsys, folder, jsonl, "--apart", "--window", "4000")
    assert found["tokens"] == count
    assert found["loss"] == pytest.approx(total / count, rel=1e-6)


def test_what_lies_beyond_the_trained_length_is_told_wrong(
    folder: Path, jsonl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With non-overlapping windows of 2 N, half the tokens are those at positions N and later."""
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokens = 4 * POSITIONS - 1  # and an end token
    rows = measured(capsys, folder, jsonl, "--extrapolate", "--tokens", str(tokens))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    row, left = [0], tokens
    for line in jsonl.read_text().splitlines():
        ids = tokenizer.encode(json.loads(line)["text"])[:left]
        row += [*ids, 0]
        left -= len(ids) + 1
        if left <= 0:
            break
    losses = nats(model, row, 2 * POSITIONS, 2 * POSITIONS)
    assert len(losses) == 4 * POSITIONS
    beyond = [loss for place, loss in enumerate(losses) if place % (2 * POSITIONS) >= POSITIONS]
    assert rows[1]["beyond_loss"] == pytest.approx(math.fsum(beyond) / len(beyond), rel=1e-6)


def test_a_prepared_set_scores_unlike_its_texts(
    tmp_path: Path,
    folder: Path,
    jsonl: Path,
    texts: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    documents = [np.array([*tokenizer.encode(text), 0]) for text in texts]
    # A leading end token, so that the set holds what the row of texts begins with.
    shard = [np.array([0]), *documents]
    file = (folder / "tokenizer.json").read_bytes()
    vocabulary = tokenizer.backend_tokenizer.get_vocab_size()
    prepared = write_token_set(tmp_path / "set", [shard], vocab_size=vocabulary, tokenizer=file)
    (of_set,) = measured(capsys, folder, prepared)
    (of_texts,) = measured(capsys, folder, jsonl)
    assert of_set == pytest.approx(of_texts)
    foreign = task_rows.byte_tokenizer()
    foreign.add_tokens(["river stone"])
    capsys.readouterr()
    text = " ".join(["river stone"] * 40)
    ids = foreign.encode(text).ids
    other = write_token_set(
        tmp_path / "foreign",
        [np.array(ids)],
        vocab_size=vocabulary + 1,
        tokenizer=foreign.to_str().encode(),
    )
    assert main(["eval", "perplexity", str(folder), str(other)]) == 2
    assert "is not the model's" in capsys.readouterr().err


@pytest.mark.parametrize("flip", [1, 255])
def test_a_flipped_byte_of_a_prepared_set_is_measured_or_a_traceback(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str], flip: int
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = np.array([*tokenizer.encode("river stone " * 40), 0])
    file = (folder / "tokenizer.json").read_bytes()
    vocabulary = tokenizer.backend_tokenizer.get_vocab_size()
    prepared = write_token_set(tmp_path / "a", [ids, ids], vocab_size=vocabulary, tokenizer=file)
    shard = prepared / "00001-000.tokens"
    content = bytearray(shard.read_bytes())
    content[129 if flip == 255 else 128] ^= flip
    shard.write_bytes(content)
    measured(capsys, folder, prepared, "--tokens", "9")  # reads the first shard alone
    assert main(["eval", "perplexity", str(folder), str(prepared)]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"sgt-ds: {shard}: tokens: do not match their checksum; ")
    assert f"`sgt-ds data verify {prepared}`" in told
    encoder = load_scored_model(folder).encoder
    if flip == 1:
        streams_of(str(prepared), encoder)  # in a run: an id like any other
        return
    with pytest.raises(UserError, match=rf"{shard}: tokens: holds id "):
        streams_of(str(prepared), encoder)


def test_a_window_beyond_text_or_model_is_told_as_if_it_were_filled(
    tmp_path: Path, folder: Path, jsonl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--tokens", str(POSITIONS + 9)]
    (whole,) = measured(capsys, folder, jsonl, *flags, "--window", "4000")
    rows = measured(capsys, folder, jsonl, *flags, "--extrapolate")
    assert [row["window"] for row in rows] == [POSITIONS, whole["tokens"]]
    assert rows[1] == whole
    main(["eval", "perplexity", str(folder), str(jsonl), *flags, "--window", "4000"])
    told = capsys.readouterr().err
    assert f"--window: the longest text has {whole['tokens']} tokens to predict" in told
    # A model with a learned vector for each position has none for more.
    config = GPT2Config(vocab_size=400, n_positions=POSITIONS, n_embd=8, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    capsys.readouterr()
    assert main(["eval", "perplexity", str(tmp_path), str(jsonl), "--extrapolate"]) == 2
    assert f"--extrapolate: {2 * POSITIONS} exceeds the model's" in capsys.readouterr().err
    measured(capsys, tmp_path, jsonl, *flags)


def test_a_wrong_file_or_flag_ends_in_a_traceback(
    tmp_path: Path, folder: Path, jsonl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for data, flags, said in (
        (tmp_path / "gone.txt", [], "no such file"),
        (tmp_path / "no.jsonl", [], "line 1: has no string `text`"),
        (tmp_path / "latin.txt", [], "byte 3: is not UTF-8"),
        (jsonl, ["--stride", "200"], "exceeds the window"),
        (jsonl, ["--tag", "5"], "names a checkpoint"),
    ):
        capsys.readouterr()
        assert main(["eval", "perplexity", str(folder), str(data), *flags]) == 2
        told = capsys.readouterr().err
        assert said in told
        assert told.count("\n") == 1
    assert main(["eval", "perplexity", str(tmp_path), str(jsonl)]) == 2


def test_what_is_no_model_is_told_in_the_words_of_another_command(
    tmp_path: Path, jsonl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = write_token_set(tmp_path / "set", [np.arange(9)])
    for command in (["perplexity", str(prepared), str(prepared)],
                    ["tasks", str(prepared), "--tasks", "sciq", "--data", "."]):  # fmt: skip
        assert main(["eval", *command]) == 2
        assert capsys.readouterr().err == (
            f"sgt-ds: {prepared}: is a prepared set, not a model; give an export, a model or a "
            "run\n"
        )
    shape = ModelConfig(
        num_layers=1, hidden_size=8, intermediate_size=16, num_heads=2, vocab_size=300
    )
    checkpoint = write_checkpoint(tmp_path / "run", Transformer(shape))
    with (checkpoint / "state.json").open("a") as stream:
        stream.write(" ")
    assert main(["eval", "perplexity", str(tmp_path / "run"), str(jsonl)]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"sgt-ds: {checkpoint}: state.json: ")
    assert line.endswith("; no other one here is complete; restore it from a copy, or retrain")
