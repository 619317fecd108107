"""Where the time of an update goes, and that finding out makes no host wait for its device."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from forked import Nursery
from runs import ROOT, metrics, run_to_end, write_data, write_run

from sgt_ds.training.parts import StepParts
from sgt_ds.training.throughput import Throughput


def no_one(part: str) -> None:
    """Nobody follows the parts."""


def test_reduction_counts_as_backward_too() -> None:
    parts = StepParts(torch.device("cpu"), no_one)
    started = time.perf_counter()
    with parts.device("backward"):
        time.sleep(0.02)
        with parts.device("reduce", within="backward"):
            time.sleep(0.05)
    passed = time.perf_counter() - started
    found = parts.seconds()
    assert found["reduce"] >= 0.05
    assert found["backward"] >= 0.02
    assert found["backward"] + found["reduce"] <= passed
    assert sum(found.values()) == pytest.approx(found["backward"] + found["reduce"])


def test_an_update_that_fails_leaves_its_part_open() -> None:
    parts = StepParts(torch.device("cpu"), no_one)
    with pytest.raises(RuntimeError, match="forward"), parts.host("forward"):
        raise RuntimeError("forward")
    assert parts.seconds()["forward"] > 0


def test_a_validation_or_what_an_earlier_process_did_counts_as_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    throughput = Throughput()
    throughput.begin(step=10, tokens=1000)
    clock[0] += 4
    assert throughput.tokens_per_second(1400) == 100
    clock[0] += 60  # a validation; the update before it was not reported
    throughput.skip(1500)
    clock[0] += 1
    assert throughput.tokens_per_second(1600) == 100
    assert throughput.step_seconds(15) == 13, "the ETA has room for validations"


def test_a_run_counts_its_validations_as_training(tmp_path: Path, nursery: Nursery) -> None:
    run = write_run(
        tmp_path / "run.yaml",
        write_data(tmp_path / "data"),
        training={"steps": 8, "validate_every": 4},
        checkpoint={"every": 100},
        telemetry={"enabled": False},
    )
    fault = json.dumps({"slow_validation": {"seconds": 4}})
    nursery.start(tmp_path / "log", [fault, run], ranks=1, entry="faulty:main").end()
    rows = {row["step"]: row for row in metrics(tmp_path / "run") if "loss" in row}
    tokens = rows[6]["tokens"] - rows[5]["tokens"]
    # Since the report before, or the validation: what is not the update itself.
    beside = {
        step: tokens / row["tokens_per_second"] - row["step_seconds"] for step, row in rows.items()
    }
    assert beside[5] < 2, beside


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_timing_a_device_waits_for_it() -> None:
    device = torch.device("cuda")
    parts = StepParts(device, no_one)
    matrix = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        started = time.perf_counter()
        with parts.device("forward"):
            for _ in range(200):
                matrix @ matrix
        parts.read_passed()
        queued = time.perf_counter() - started
        assert parts.seconds()["forward"] == 0.0
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    finished = time.perf_counter() - started
    parts.read_passed()
    assert queued < parts.seconds()["forward"] <= finished


@pytest.mark.launcher
def test_telemetry_makes_the_host_wait_between_log_intervals(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "profiled.yaml",
        write_data(tmp_path / "data"),
        # Windows fall at 9, 12 and 15: growth itself waits there, with telemetry or without.
        growth={"t_start": 9, "interval": 3},
        training={"steps": 12, "log_every": 6},
    )
    output = run_to_end([sys.executable, str(ROOT / "tests" / "profiled_steps.py"), str(run)])
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"step"')]
    assert [row["step"] for row in rows] == list(range(1, 13))
    quiet = [row for row in rows if row["step"] in (2, 3, 4, 5, 7, 8)]
    with_it, without = (
        {json.dumps(row["waits"], sort_keys=True) for row in quiet if row["telemetry"] is there}
        for there in (True, False)
    )
    assert with_it == without
    assert len(with_it) == 1
    # The profiler does see the wait of a logged update.
    assert sum(rows[5]["waits"].values()) > sum(rows[4]["waits"].values())
