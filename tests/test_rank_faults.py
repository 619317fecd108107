"""One rank goes wrong: another weight, an inf gradient. All ranks notice, and say which."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from forked import Nursery
from torch import nn

from sgt_ds.config import load_run_config, prepare_run_directory
from sgt_ds.errors import LostPeer
from sgt_ds.telemetry import read_outcome
from sgt_ds.training.build import _noted_failure
from sgt_ds.training.integrity import checksums

FAULTY = "faulty:main"
CPU_BF16 = runs.ROOT / "ds_configs" / "zero2_bf16_cpu.json"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_data(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("besides", ["nothing", "dies", "full_disk"])
def test_a_bit_turns_in_one_ranks_weights_and_training_goes_on(
    tmp_path: Path, data: Path, nursery: Nursery, besides: str
) -> None:
    """`dies`: that rank, while the others wait for the save of step 6; what is said stays.

    `full_disk`: that save fails, and there is no next one.
    """
    file = runs.write_run(
        tmp_path / "run.yaml",
        data,
        training={"global_batch_size": 6, "compare_ranks_every": 1},
        checkpoint={"every": 3},
    )
    flip = {"rank": 2, "step": 7, "parameter": "blocks.3.qkv.weight"}
    # The save of step 6 is still under way at step 7.
    fault: dict[str, Any] = {"flip": flip, "slow_disk": 1.0}
    if besides == "dies":
        fault["dies"] = {"rank": 2, "step": 7}
    if besides == "full_disk":
        fault["full_disk"] = {"rank": 1, "steps": [4, 99]}
    ranks = nursery.start(tmp_path / "log", [json.dumps(fault), file], ranks=3, entry=FAULTY)
    mismatch = "step 7: rank 2 of 3 holds different weights from the others"
    if besides == "dies":
        assert ranks.statuses() == [1, 1, -signal.SIGKILL]
        outcome = read_outcome(tmp_path / "run" / "control")
        assert outcome is not None
        assert mismatch in outcome.reason
        assert mismatch in ranks.said()
        return
    told = ranks.end(expect=1)
    assert mismatch in told
    assert "first in blocks.3.qkv.weight" in told
    assert "Traceback" not in told
    assert told.count("sgt-ds train: ") == 1
    saved = tmp_path / "run" / "checkpoints" / "step-00000006"
    assert saved.is_dir() == (besides == "nothing")
    failures = [line for line in told.splitlines() if "step-00000006 was not saved" in line]
    assert len(failures) == (besides == "full_disk")
    assert not [line for line in failures if "retrying" in line]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_flipped_bit_or_moved_values_leave_the_checksum(dtype: torch.dtype) -> None:
    model = nn.Linear(300, 100, dtype=dtype)
    before = checksums(model)
    assert len(before) == 2
    draw = torch.Generator().manual_seed(0)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    bits = model.weight.data.view(-1).view(integer)
    for place in [0, len(bits) - 1, *torch.randint(len(bits), (50,), generator=draw).tolist()]:
        bit = int(torch.randint(8 * dtype.itemsize - 1, (), generator=draw))
        bits[place] ^= 1 << bit
        after = checksums(model)
        assert after[0] != before[0]
        assert after[1] == before[1]
        bits[place] ^= 1 << bit
    assert torch.equal(checksums(model), before)
    with torch.no_grad():
        model.weight[0, 0], model.weight[99, 0] = 1.5, 2.5
        one = checksums(model)
        model.weight[0, 0], model.weight[99, 0] = 2.5, 1.5
    assert checksums(model)[0] != one[0]


@pytest.mark.parametrize(
    ("given", "stage"),
    [(CPU_BF16, 2), (runs.CPU_FP32, 2), (runs.CPU_FP32, 0)],
    ids=["bf16", "fp32", "no ZeRO"],
)
def test_an_inf_on_one_rank_reaches_the_optimizer_or_moves_a_clock(
    tmp_path: Path, data: Path, nursery: Nursery, given: Path, stage: int
) -> None:
    """Step 6 has a layer in its entry window, and warm-up of the rate: both must stand still."""
    values = json.loads(given.read_text())
    values["zero_optimization"]["stage"] = stage
    deepspeed = tmp_path / "ds.json"
    deepspeed.write_text(json.dumps(values))
    file = runs.write_run(
        tmp_path / "run.yaml",
        data,
        training={"steps": 10},
        optimizer={"warmup_steps": 9},
        deepspeed=str(deepspeed),
    )
    fault = json.dumps({"inf": {"rank": 1, "step": 6, "times": 2}})
    told = nursery.start(tmp_path / "log", [fault, file], ranks=2, entry=FAULTY).end()
    skips = [json.loads(line[5:]) for line in told.splitlines() if line.startswith("skip ")]
    assert len(skips) == 4  # two updates, each on both ranks
    assert all(skip["state"] and skip["clock"] for skip in skips), skips
    rates = {row["step"]: row["learning_rate"] for row in runs.metrics(tmp_path / "run")[:7]}
    # The rate of the update that was skipped twice is that of the one applied in the end.
    assert {skip["rate"] for skip in skips} == {rates[7]}
    losses = runs.losses(tmp_path / "run")
    assert sorted(losses) == list(range(1, 11))
    assert runs.metrics(tmp_path / "run")[-2]["tokens"] == 12 * 8 * 64
    norms = [row["grad_norm"] for row in runs.metrics(tmp_path / "run") if "loss" in row]
    assert all(0 < norm < 10 for norm in norms), norms
    runs.check_replay(tmp_path / "run")


def test_a_run_that_stays_not_finite_goes_on_for_ever(
    tmp_path: Path, data: Path, nursery: Nursery
) -> None:
    file = runs.write_run(
        tmp_path / "run.yaml",
        data,
        training={"max_skipped_steps": 3},
        checkpoint={"every": 4},
        deepspeed=str(CPU_BF16),
    )
    fault = {"inf": {"rank": 0, "step": 8, "times": 99}, "slow_disk": 0.2}
    ranks = nursery.start(tmp_path / "log", [json.dumps(fault), file], ranks=2, entry=FAULTY)
    told = ranks.end(expect=1)
    # The checkpoint of step 8 was still being written when the first update was skipped.
    good = tmp_path / "run" / "checkpoints" / "step-00000008"
    assert "step 8: 3 updates in a row had non-finite gradients" in told
    assert f"last good checkpoint: {good}" in told
    assert "Traceback" not in told
    assert told.count("sgt-ds train: ") == 1
    outcome = read_outcome(tmp_path / "run" / "control")
    assert outcome is not None
    assert outcome.status == 1
    assert outcome.reason.startswith("the run failed: step 8: 3 updates in a row")


def test_how_a_raw_run_ended_points_to_a_log_that_does_not_tell(tmp_path: Path) -> None:
    data = runs.write_data(tmp_path / "data")
    config = load_run_config(runs.write_run(tmp_path / "run.yaml", data))
    prepare_run_directory(config, resuming=False)
    for error, told in (
        (RuntimeError("boom\nand more"), "the run failed: RuntimeError: boom"),
        (MemoryError(), "the run failed: MemoryError"),
        (
            LostPeer("rank 0 on a lost another rank"),
            "the run failed: rank 0 on a lost another rank",
        ),
    ):
        with pytest.raises(type(error)), _noted_failure(config):
            raise error
        outcome = read_outcome(tmp_path / "run" / "control")
        assert outcome is not None
        assert (outcome.status, outcome.reason) == (1, told)
