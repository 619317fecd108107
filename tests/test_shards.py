"""Token shards and prepared sets: what is written is read, and no damage goes unnoticed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
from token_sets import TOKENIZER_SHA256, write_token_set

from sgt_ds.config import DataConfig, DataSource, EvaluationConfig, ModelConfig, TextSource
from sgt_ds.data import check_data, check_shards, open_token_set
from sgt_ds.data.shards import Shard, write_shard
from sgt_ds.errors import UserError
from sgt_ds.evaluation import check_evaluation

TINY = ModelConfig(hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, vocab_size=1000)


def test_layout_is_the_documented_one(tmp_path: Path) -> None:
    path = tmp_path / "x.tokens"
    with write_shard(path, 1000, TOKENIZER_SHA256) as writer:
        writer.add(np.array([5, 6, 7]))
        writer.add(np.array([999, 0]))
    content = path.read_bytes()
    assert content[:8] == b"SGTTOKEN"
    assert list(np.frombuffer(content, "<u4", 4, 8)) == [1, 128, 2, 1000]
    assert list(np.frombuffer(content, "<u8", 2, 24)) == [5, 2]
    assert content[72:104].hex() == TOKENIZER_SHA256
    assert list(np.frombuffer(content, "<u2", 5, 128)) == [5, 6, 7, 999, 0]
    assert list(np.frombuffer(content, "<u8", offset=144)) == [0, 3, 5]
    assert list(Shard(path).document(1)) == [999, 0]


def test_ids_above_65535_are_not_truncated(tmp_path: Path) -> None:
    with write_shard(tmp_path / "x.tokens", 70_000, TOKENIZER_SHA256) as writer:
        writer.add(np.array([69_999]))
        with pytest.raises(ValueError, match="outside the vocabulary"):
            writer.add(np.array([70_000]))
    assert Shard(tmp_path / "x.tokens").tokens.tolist() == [69_999]


def test_an_interrupted_shard_leaves_no_file(tmp_path: Path) -> None:
    def cut_off() -> None:
        with write_shard(tmp_path / "x.tokens", 10, TOKENIZER_SHA256) as writer:
            writer.add(np.array([1]))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        cut_off()
    assert list(tmp_path.iterdir()) == []


def test_every_flipped_byte_of_a_shard_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.tokens"
    with write_shard(path, 1000, TOKENIZER_SHA256) as writer:
        writer.add(np.arange(5))
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :])
        try:
            found = Shard(path).faults()
        except UserError as error:
            found = [str(error)]
        assert found, f"byte {place}"
    for size in (0, 7, 100, 128, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(UserError):
            Shard(path)


def test_every_flipped_byte_of_the_manifest_is_found(tmp_path: Path) -> None:
    directory = write_token_set(tmp_path / "set", [np.arange(40)])
    path = directory / "manifest.json"
    good = path.read_bytes()
    json.loads(good)
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x04]) + good[place + 1 :])
        with pytest.raises(UserError, match="manifest"):
            open_token_set(directory)


def test_sequences_cover_each_token_once_as_target(tmp_path: Path) -> None:
    shards = [np.arange(0, 41), np.arange(100, 109), np.arange(200, 203), np.arange(300, 325)]
    token_set = open_token_set(write_token_set(tmp_path / "set", shards))
    targets: list[int] = []
    for index in range(token_set.num_sequences(8)):
        row = token_set.sequence(index, 8)
        assert row.dtype == np.int64
        assert (np.diff(row) == 1).all(), "a sequence crosses two shards"
        targets += row[1:].tolist()
    # 40 = 5 × 8 targets, 8, none of three tokens, 24: all but each shard's first token.
    assert targets == [*range(1, 41), *range(101, 109), *range(301, 325)]
    with pytest.raises(IndexError):
        token_set.sequence(token_set.num_sequences(8), 8)


def test_the_trainer_hears_what_does_not_fit(tmp_path: Path) -> None:
    first = write_token_set(tmp_path / "first", [np.arange(100)])
    other = write_token_set(tmp_path / "other", [np.arange(100)], tokenizer=b"another")
    wide = write_token_set(tmp_path / "wide", [np.arange(100)], vocab_size=1001)

    def message(train: Path, validation: Path | None = None, length: int = 10) -> str:
        data = DataConfig(
            train=[DataSource(path=train)], validation=validation, sequence_length=length
        )
        with pytest.raises(UserError) as caught:
            check_data(data, TINY)
        return str(caught.value)

    check_data(DataConfig(train=[DataSource(path=first)], sequence_length=99), TINY)
    assert "100 needs shards of 101 tokens, but the longest here has 100" in message(
        first, length=100
    )
    assert str(other) in message(first, other)
    assert "1001 exceeds the model's 1000" in message(wide)
    assert "not a prepared set" in message(tmp_path)
    assert "does not exist" in message(tmp_path / "nowhere")


def test_a_shard_of_another_set_is_refused(tmp_path: Path) -> None:
    first = write_token_set(tmp_path / "first", [np.arange(100)])
    other = write_token_set(tmp_path / "other", [np.arange(100)], tokenizer=b"another")
    (first / "00000-000.tokens").write_bytes((other / "00000-000.tokens").read_bytes())
    with pytest.raises(UserError, match="does not match"):
        open_token_set(first).sequence(0, 10)


def test_fingerprint_follows_content_not_names(tmp_path: Path) -> None:
    sets = [
        open_token_set(write_token_set(tmp_path / name, [np.arange(last)]))
        for name, last in (("a", 50), ("b", 50), ("c", 51))
    ]
    assert sets[0].fingerprint == sets[1].fingerprint != sets[2].fingerprint
    assert hashlib.sha256(b"tokenizer").hexdigest() == sets[0].tokenizer_sha256


def test_the_documented_numpy_lines_read_a_shard(tmp_path: Path) -> None:
    page = Path(__file__).parent.parent / "docs" / "data-format.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for line in program.splitlines() if line]
    assert len(lines) <= 10
    names: dict[str, Any] = {}
    exec(program, names)
    for vocabulary in (1000, 100_000):
        path = tmp_path / f"{vocabulary}.tokens"
        with write_shard(path, vocabulary, TOKENIZER_SHA256) as writer:
            writer.add(np.array([5, 6, vocabulary - 1]))
            writer.add(np.array([8, 9]))
        tokens, starts = names["read_shard"](path)
        assert tokens.tolist() == [5, 6, vocabulary - 1, 8, 9]
        assert starts.tolist() == [0, 3, 5]


def test_a_shard_that_is_gone_or_cut_is_found_at_the_first_validation(tmp_path: Path) -> None:
    shards = [np.full(50, number) for number in range(3)]
    train, validation = (write_token_set(tmp_path / name, shards) for name in ("train", "val"))
    data = DataConfig(train=[DataSource(path=train)], validation=validation, sequence_length=4)
    check_shards(data)
    text = TextSource(name="val", path=str(validation))
    scored = EvaluationConfig(every=1, perplexity=[text])
    check_evaluation(scored, "run.yaml")
    last = sorted(validation.glob("*.tokens"))[-1]
    size = last.stat().st_size
    os.truncate(last, size - 8)
    with pytest.raises(UserError, match=f"holds {size - 8} bytes, not {size}; ") as cut:
        check_shards(data)
    assert (cut.value.file, cut.value.field) == (str(last), "data.validation")
    last.unlink()
    with pytest.raises(UserError, match="is missing; prepare the set again"):
        check_shards(data)
    with pytest.raises(UserError, match="is missing; prepare the set again") as gone:
        check_evaluation(scored, "run.yaml")
    assert gone.value.field == "evaluation.perplexity.0.path"


def test_a_shard_that_may_not_be_read_is_found_at_the_first_validation(tmp_path: Path) -> None:
    run = runs.write_run(tmp_path / "run.yaml", runs.write_data(tmp_path / "data"))
    [shard] = (tmp_path / "data" / "val").glob("*.tokens")
    shard.chmod(0)
    command = ["sgt-ds", "plan", str(run)]
    if os.geteuid() == 0:  # whom modes do not hinder
        powers = "-dac_override,-dac_read_search"
        command = ["setpriv", f"--bounding-set={powers}", f"--inh-caps={powers}", *command]
    told = subprocess.run(
        command, env=runs.environment(), capture_output=True, text=True, check=False
    )
    assert told.returncode == 2
    [line] = told.stderr.splitlines()
    assert line.startswith(
        f"sgt-ds: {shard}: data.validation: cannot be read (Permission denied); "
    )


READ_ALL = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 400))
import numpy as np
from sgt_ds.data import open_token_set
sets = [open_token_set(Path(path)) for path in sys.argv[1:]]
for _ in range(2):
    for token_set in sets:
        rows = token_set.read(np.arange(token_set.num_sequences(4)), 4)
        assert rows[:, 1].tolist() == list(range(500))
"""


def test_more_shards_than_a_process_may_open_files(tmp_path: Path) -> None:
    """Each mapping holds a descriptor; C4 has as many shards as the usual limit allows files."""
    shards = [np.full(5, number) for number in range(500)]
    paths = [str(write_token_set(tmp_path / name, shards)) for name in ("a", "b")]
    subprocess.run([sys.executable, "-c", READ_ALL, *paths], check=True)
