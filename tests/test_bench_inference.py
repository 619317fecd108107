"""`sgt-ds bench inference` as a user calls it."""

from __future__ import annotations

import json

import pytest

from sgt_ds.cli import main

SMALL = ["bench", "inference", "--preset", "tiny", "--device", "cpu", "--rounds", "2"]
SMALL += ["--prompt", "8", "--generate", "4"]


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_case_that_is_not_timed_or_not_beside_vanilla(
    mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    batch, depth = (["1", "2"], "3") if mode == "eager" else (["1"], "1")
    assert main([*SMALL, "--mode", mode, "--batch", *batch, "--k-max", depth, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    cases = ["vanilla", *(f"sgt, K = {k + 1}" for k in range(int(depth))), "block loop"]
    rows = document["rows"]
    assert [(r["case"], r["batch"]) for r in rows] == [(c, int(b)) for b in batch for c in cases]
    for row in rows:
        assert row["prefill_tokens_per_second"] > 0
        assert row["decode_ratio_quartiles"][0] <= row["decode_ratio"]
    vanilla = [row for row in rows if row["case"] == "vanilla"]
    assert all(row["decode_ratio"] == row["prefill_ratio"] == 1 for row in vanilla)
    assert document["compiled"] == (mode == "compiled")


@pytest.mark.parametrize("flags", [["--heads", "9"], ["--layers", "7"], ["--batch", "0"]])
def test_bad_usage_is_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main([*SMALL, *flags])
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert flags[0] in line
