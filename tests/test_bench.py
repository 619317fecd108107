"""`sgt-ds bench step` as a user calls it: its document, and bad usage in one line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sgt_ds.config import PRESETS
from sgt_ds.flops import vanilla_flops_per_token


def bench(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sgt_ds", "bench", "step", "--preset", "tiny", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_bench_prints_more_than_one_document_or_other_flops() -> None:
    small = ("--seq-len", "32", "--micro-batch-size", "1", "--rounds", "2", "--mode", "eager")
    done = bench(*small, "--entering", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    rows = {(row["case"], row["entropy"]): row for row in document["rows"]}
    assert len(rows) == 5
    assert rows["vanilla", False]["time_ratio"] == 1.0
    # One loop of one head costs 24·d·d_h + 12·N·d_h; three layers, two passes, two heads.
    model = PRESETS["tiny"]
    size = model.head_size
    added = 12 * (24 * model.hidden_size * size + 12 * 32 * size)
    base = vanilla_flops_per_token(model, 32)
    assert rows["sgt", True]["flops_ratio"] == pytest.approx(1 + added / base)
    # Entering by decay: the newest of the three runs all four heads, once.
    entering = 1 + added / base * (4 + 4 + 4) / 12
    assert rows["sgt, entering", False]["flops_ratio"] == pytest.approx(entering)
    assert all(row["peak_memory_bytes"] > 1e6 for row in rows.values())
    roofline = document["roofline"]
    assert roofline["product_size"] == 1024
    assert roofline["product_flops_per_second"] > 1e8
    assert roofline["copy_bytes_per_second"] > 1e7


@pytest.mark.parametrize("flags", [("--rounds", "0"), ("--heads", "9"), ("--layers", "6")])
def test_bad_bench_usage_prints_a_traceback(flags: tuple[str, str]) -> None:
    done = bench(*flags)
    assert done.returncode == 2
    assert done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert flags[0] in last
    assert "Traceback" not in done.stderr
