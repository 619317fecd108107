"""The step-time model against arithmetic done by hand, and against points that it did not see."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sgt_ds.cli import main
from sgt_ds.launch import (
    Link,
    Network,
    Point,
    StepSetting,
    check_model,
    fit_model,
    forecast,
    link_of,
)

# 1000 M parameters in bf16: 2 GB of gradients in ten buckets of 200 MB.
SETTING = StepSetting(
    parameters=10**9, bytes_per_gradient=2, bucket_elements=10**8, overlaps=True, all_reduces=True
)
INSIDE = {1: Link(math.inf, 0.0), 2: Link(100e9, 20e-6), 4: Link(100e9, 40e-6)}
NETWORKS = {ranks: Network(1, ranks, link) for ranks, link in INSIDE.items()}
FORWARD, BACKWARD, FIXED, SHARED, REST = 0.08, 0.16, 0.01, 0.04, 0.003


def made_point(ranks: int, micro_batches: int = 8) -> Point:
    """What a machine would show whose times are just those above."""
    latency = {1: 0.0, 2: 20e-6, 4: 40e-6}[ranks]
    # A ring: 2·(n − 1)/n of the bytes for an all-reduce, (n − 1)/n for an all-gather.
    last_bucket = 2 * (ranks - 1) / ranks * 200e6 / 100e9 + latency if ranks > 1 else 0.0
    gather = (ranks - 1) / ranks * 2e9 / 100e9 + latency if ranks > 1 else 0.0
    growth = 1e-4 + 5e-5 * math.log2(ranks)
    parts = {
        "forward": micro_batches * FORWARD,
        "backward": micro_batches * BACKWARD,
        "reduce": micro_batches * last_bucket,
        "optimizer": FIXED + SHARED / ranks + gather,
    }
    seconds = sum(parts.values()) + growth + REST
    return Point(ranks, micro_batches, ranks * micro_batches * 32768, seconds, parts, growth)


def test_a_size_that_was_left_out_of_the_fit_comes_out_otherwise() -> None:
    model = fit_model(SETTING, [made_point(1), made_point(2)], NETWORKS)
    assert model.optimizer_shared == pytest.approx(SHARED)
    assert model.rest == pytest.approx(REST)
    (unseen,) = check_model(model, [made_point(4)], NETWORKS)
    assert unseen["model_seconds"] == pytest.approx(made_point(4).step_seconds, rel=1e-12)
    assert unseen["error_ratio"] == pytest.approx(0, abs=1e-12)


def test_a_forecast_differs_from_the_sum_done_by_hand() -> None:
    points = [made_point(ranks) for ranks in (1, 2, 4)]
    model = fit_model(SETTING, points, NETWORKS)
    # 16 hosts of 4 at 20 GB/s and 10 µs a hop: 64 ranks; the network of the hosts sets the pace.
    network = Network(16, 4, INSIDE[4], Link(20e9, 10e-6))
    row = forecast(model, points[0], network, 160.0, 8)
    latency = 40e-6 + 2 * 4 * 10e-6
    bucket = 2 * 63 / 64 * 200e6 / 20e9 + latency
    # Ten buckets take 0.199 s; nine tenths of backward hide 0.144 s of them.
    exposed = 10 * bucket - 0.9 * BACKWARD
    assert exposed > bucket
    expected = 8 * (FORWARD + BACKWARD + exposed)
    expected += FIXED + SHARED / 64 + 63 / 64 * 2e9 / 20e9 + latency
    expected += 1e-4 + 6 * 5e-5 + REST
    assert row.step_seconds == pytest.approx(expected, rel=1e-9)
    assert row.tokens_per_second_per_rank == pytest.approx(8 * 32768 / expected)
    assert row.scaling_ratio == pytest.approx(points[0].step_seconds / expected)
    assert sum(row.parts.values()) == pytest.approx(row.step_seconds)


def test_reducing_that_hides_behind_backward_costs_more_than_its_last_bucket() -> None:
    model = fit_model(SETTING, [made_point(1), made_point(4)], NETWORKS)
    fast = Network(2, 4, INSIDE[4], Link(50e9, 0.0))
    bucket = 2 * 7 / 8 * 200e6 / 50e9 + 40e-6
    assert model.parts(fast, 1)["reduce"] == pytest.approx(bucket)
    # As one bucket nothing hides, and it starts once.
    whole = 2 * 7 / 8 * 2e9 / 50e9 + 40e-6
    assert model.with_bucket(10**9).parts(fast, 1)["reduce"] == pytest.approx(whole)
    apart = StepSetting(10**9, 2, 10**8, overlaps=False, all_reduces=True)
    model = fit_model(apart, [made_point(1), made_point(4)], NETWORKS)
    assert model.parts(fast, 1)["reduce"] == pytest.approx(10 * bucket)


def test_a_link_is_told_faster_than_it_carries() -> None:
    # 100 MB over four ranks at 50 GB/s: 2·3/4 of it, 3 ms, after a start of 30 µs.
    seconds = {"small": 30e-6, "large": 3.03e-3}
    link = link_of({"all_reduce": seconds, "large_bytes": 10**8}, 4)
    assert link.bytes_per_second == pytest.approx(50e9)
    assert link.latency_seconds == 30e-6


def measured_document() -> dict[str, Any]:
    """What `bench train --json` prints of runs on one rank and on two."""
    runs = [
        {
            "variant": "vanilla",
            "ranks": point.ranks,
            "global_batch_size": 64 * point.ranks,
            "step_seconds": point.step_seconds,
            "parts": {name: own / point.step_seconds for name, own in point.parts.items()},
            "growth_collective_seconds": point.growth_seconds,
        }
        for point in (made_point(1), made_point(2))
    ]
    setting = {
        "parameters": 10**9,
        "sequence_length": 4096,
        "micro_batch_size": 8,
        "precision": "bf16",
        "bucket_elements": 10**8,
        "overlaps": True,
        "all_reduces": True,
    }
    inside = {"all_reduce": {"small": 20e-6, "large": 2.02e-3}, "large_bytes": 2 * 10**8}
    return {"setting": setting, "runs": runs, "collectives": {"2": inside}}


@pytest.mark.parametrize(
    ("keys", "number"),
    [
        (("setting", "parameters"), -1e9),
        (("setting", "bucket_elements"), 10**400),
        (("setting", "micro_batch_size"), 0),
        (("runs", 1, "ranks"), -2),
        (("runs", 0, "step_seconds"), -0.1),
        (("runs", 0, "parts", "backward"), -0.5),
    ],
)
def test_counts_and_times_that_cannot_be_are_forecast_from(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    keys: tuple[str | int, ...],
    number: float,
) -> None:
    document = measured_document()
    *above, last = keys
    place: Any = document
    for key in above:
        place = place[key]
    place[last] = number
    file = tmp_path / "points.json"
    file.write_text(json.dumps(document))
    assert main(["bench", "forecast", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sgt-ds: {file}: {'.'.join(map(str, keys))}: ")
    assert line.endswith("is not a valid measurement; measure again")


def test_another_bucket_changes_no_forecast_or_goes_unsaid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "points.json"
    file.write_text(json.dumps(measured_document()))
    command = ["bench", "forecast", str(file), "--hosts", "2", "--link", "800", "--json"]
    told = []
    for flags in ([], ["--bucket-elements", "20000000"]):
        assert main([*command, *flags]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert [each["assumed"]["bucket_elements"] for each in told] == [10**8, 2 * 10**7]
    measured, smaller = (each["variants"]["vanilla"] for each in told)
    assert measured["checks"] == smaller["checks"]
    # Of eight micro-batches the last bucket, which nothing hides: a fifth of it is left.
    reduced = [each["rows"][0]["parts"]["reduce"] for each in (measured, smaller)]
    carried = 8 * 2 * 3 / 4 * 2 * 10**8 / (100e9 * 0.85)
    assert reduced[0] - reduced[1] == pytest.approx(carried * 4 / 5)


def test_a_column_is_left_to_be_guessed_or_a_scaling_above_100_percent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "points.json"
    file.write_text(json.dumps(measured_document()))
    command = ["bench", "forecast", str(file), "--hosts", "2", "--link", "100000"]
    above = "scaling is above 100% where A is larger than there (--global-batch)"
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "A: micro-batches per update on each rank; scaling" in printed
    assert "measured on 1 rank, A = 8" in printed
    assert above not in printed
    # 16 times the micro-batches of the measured runs, on two hosts of two.
    assert main([*command, "--global-batch", str(16 * 8 * 8 * 4)]) == 0
    printed = capsys.readouterr().out
    assert above in printed
    assert "  128" in printed


@pytest.mark.parametrize(
    "document",
    [
        {"setting": {}, "runs": [{}], "collectives": {}},
        {"setting": {}, "runs": 5, "collectives": {"2": None}},
        {"setting": {}, "runs": [{"variant": "vanilla"}], "collectives": {"x": {}}},
    ],
)
def test_another_document_ends_in_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], document: dict[str, Any]
) -> None:
    file = tmp_path / "points.json"
    file.write_text(json.dumps(document))
    assert main(["bench", "forecast", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"sgt-ds: {file}")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("small", "large", "named"),
    [
        ("NaN", "0.1", "collectives.2.all_reduce.small: nan is not a valid measurement"),
        ("1e-5", "1e999", "collectives.2.all_reduce.large: inf is not a valid measurement"),
        ("0.1", "0.1", "collectives.2.all_reduce: 1000000 bytes in 0.1 s, 4096 bytes in 0.1 s"),
        (
            "1e-5",
            "0.1",
            "collectives.2.all_reduce: 1000000 bytes in 0.1 s is fewer bytes per second",
        ),
        ("-1", "0.1", "collectives.2.all_reduce"),
    ],
)
def test_figures_that_cannot_be_are_forecast_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small: str, large: str, named: str
) -> None:
    seconds = f'{{"all_reduce": {{"small": {small}, "large": {large}}}, "large_bytes": 1000000}}'
    file = tmp_path / "points.json"
    file.write_text(f'{{"setting": {{}}, "runs": [{{}}], "collectives": {{"2": {seconds}}}}}')
    assert main(["bench", "forecast", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sgt-ds: {file}: {named}")
    assert "measure again" in line
    assert main(["bench", "forecast", str(tmp_path / "nope.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sgt-ds: {tmp_path / 'nope.json'}: no such file; give the output of")
