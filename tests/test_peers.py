"""The script that times other trainers: a real run of one, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import peers
import pytest
from runs import environment
from torch import nn

from sgt_ds.config import PRESETS


def timed(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, peers.__file__, *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.launcher
def test_two_ranks_of_transformers_train_another_shape_or_are_not_timed() -> None:
    shape = ("--preset", "tiny", "--seq-len", "64", "--micro-batch-size", "2", "--gpus", "2")
    length = ("--micro-batches", "2", "--updates", "1", "--intervals", "3", "--warmup", "1")
    done = timed("transformers", *shape, *length, "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout)
    tiny = PRESETS["tiny"]
    assert told["parameters"] >= 2 * tiny.padded_vocab_size * tiny.hidden_size
    seconds = told["seconds_per_update"]
    assert 0 < seconds["min"] <= seconds["median"] <= seconds["max"]


def test_a_warm_up_counts_or_an_interval_is_taken_for_an_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = iter([10.0, 14.0, 20.0, 21.0])  # of the warm-up, and of three intervals
    monkeypatch.setattr(peers, "time", SimpleNamespace(perf_counter=lambda: next(ends)))
    batch = {"micro_batch_size": 2, "micro_batches": 3, "seq_len": 64}  # 384 tokens on each GPU
    setting = peers.Setting("transformers", "tiny", **batch, gpus=2, warmup=3)
    clock = peers.Clock(setting)
    for _ in range(setting.steps):
        clock.update_done()
    found = peers.figures(setting, clock.seconds)
    assert found["seconds_per_update"] == {"median": 2.0, "min": 0.5, "max": 3.0}
    assert found["tokens_per_second_per_gpu"] == {"median": 192.0, "min": 128.0, "max": 768.0}


def test_another_shape_than_the_presets_is_timed() -> None:
    tiny = PRESETS["tiny"]
    with pytest.raises(peers.Refused, match="parameters, the preset"):
        peers.checked_parameters(nn.Linear(tiny.hidden_size, tiny.hidden_size), tiny)


@pytest.mark.parametrize(
    "words", [("--micro-batches", "0"), ("--preset", "none"), ("--gpus", "two")]
)
def test_a_wrong_option_is_a_traceback(words: tuple[str, str]) -> None:
    done = timed("transformers", *words)
    assert done.returncode == 2
    assert words[0] in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
