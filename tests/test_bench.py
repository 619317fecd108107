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
    cases = ("--variants", "vanilla", "sgt:2", "block_loop:1", "--entering", "decay", "ramp")
    done = bench(*small, *cases, "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    rows = {(row["case"], row["entropy"]): row for row in document["rows"]}
    told = {case: row["flops_ratio"] - 1 for (case, entropy), row in rows.items() if entropy}
    assert len(rows) == len(told) + 1 == 6
    assert rows["vanilla", True]["time_ratio"] == 1.0
    assert rows["vanilla", False]["flops_ratio"] == 1.0
    # One loop of one head costs 24·d·d_h + 12·N·d_h.
    model = PRESETS["tiny"]
    size = model.head_size
    base = vanilla_flops_per_token(model, 32)
    head = (24 * model.hidden_size * size + 12 * 32 * size) / base
    assert told["sgt:2"] == pytest.approx(3 * 2 * 2 * head)  # layers, passes, heads
    assert told["entering by decay"] == pytest.approx(4 * head)  # all heads, in one layer
    assert told["entering by ramp"] == pytest.approx(2 * head)
    block = 4 * head + 18 * model.hidden_size * model.intermediate_size / base
    assert told["block_loop:1"] == pytest.approx(3 * block)
    assert all(row["peak_memory_bytes"] > 1e6 for row in rows.values())
    roofline = document["roofline"]
    assert roofline["product_size"] == 1024
    assert roofline["product_flops_per_second"] > 1e8
    assert roofline["copy_bytes_per_second"] > 1e7


@pytest.mark.parametrize(
    "flags", [("--rounds", "0"), ("--heads", "9"), ("--layers", "6"), ("--variants", "sgt")]
)
def test_bad_bench_usage_prints_a_traceback(flags: tuple[str, str]) -> None:
    done = bench(*flags)
    assert done.returncode == 2
    assert done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert flags[0] in last
    assert "Traceback" not in done.stderr
