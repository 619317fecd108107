"""`sgt-ds bench train` as a user calls it: real runs through the launcher, and bad usage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from runs import environment, wait_for_step, write_data, write_run

import sgt_ds.launch
from sgt_ds.cli import main
from sgt_ds.config import PRESETS
from sgt_ds.errors import SgtError, UserError
from sgt_ds.flops import parameter_count, vanilla_flops_per_token
from sgt_ds.launch import RunFigures, bench_launch, gpu_arguments, with_ratios

MODEL = PRESETS["tiny"].model_copy(update={"vocab_size": 300})
LENGTH, MICRO_BATCH = 64, 2


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sgt_ds", "bench", *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def run_file(folder: Path) -> Path:
    shape: dict[str, Any] = {"vocab_size": MODEL.vocab_size}
    return write_run(folder / "run.yaml", write_data(folder / "data"), model=shape)


@pytest.mark.launcher
def test_a_bench_of_real_runs_tells_other_figures_than_the_runs(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    done = bench(
        *("train", str(run_file(tmp_path)), "--variants", "vanilla", "sgt:2", "--num-gpus", "2"),
        *("--micro-batches", "3", "--updates", "2", "--intervals", "3", "--scratch", str(scratch)),
        *("--load", "--json"),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    setting = document["setting"]
    assert document["complete"]
    assert setting["parameters"] == parameter_count(MODEL)
    assert (setting["micro_batch_size"], setting["sequence_length"]) == (MICRO_BATCH, LENGTH)
    assert (setting["precision"], setting["overlaps"]) == ("fp32", False)

    vanilla, looped = document["runs"]
    base = vanilla_flops_per_token(MODEL, LENGTH)
    # One loop of one head costs 24·d·d_h + 12·N·d_h; three layers, two passes, two heads.
    size = MODEL.head_size
    added = 12 * (24 * MODEL.hidden_size * size + 12 * LENGTH * size)
    assert (vanilla["flops_per_token"], looped["flops_per_token"]) == (base, base + added)
    assert looped["flops_ratio"] == pytest.approx(1 + added / base)
    assert vanilla["time_ratio"] == vanilla["scaling_ratio"] == 1.0
    assert looped["excess"] == pytest.approx((looped["time_ratio"] - 1) / (added / base))
    for run, name in ((vanilla, "vanilla-2-0"), (looped, "sgt-2-2-0")):
        # Four intervals of two updates; the first is not timed.
        rows = [
            json.loads(line)
            for line in (scratch / name / "metrics.jsonl").read_text().splitlines()
            if '"loss"' in line
        ]
        assert [row["step"] for row in rows] == [2, 4, 6, 8]
        batch = 3 * MICRO_BATCH * 2
        assert run["global_batch_size"] == batch
        timed = sorted(batch * LENGTH / row["tokens_per_second"] for row in rows[1:])
        assert run["step_seconds"] == pytest.approx(timed[1])
        assert run["step_seconds_range"] == pytest.approx([timed[0], timed[-1]])
        speed = run["tokens_per_second_per_rank"]
        assert 2 * speed * run["step_seconds"] == pytest.approx(batch * LENGTH)
        assert sum(run["parts"].values()) == pytest.approx(1)
        assert run["parts"]["backward"] > 0
        assert not {"validation", "checkpoint"} & run["parts"].keys(), "no part of an update"
        assert run["growth_collective_seconds"] > 0
        assert run["checkpoint_seconds"] > 0
        assert 0 < run["load_seconds"] < 60
        assert run["rank_spread_ratio"] > 0
        assert not (scratch / name / "checkpoints").exists()

    roofline = document["roofline"]
    assert roofline["product_size"] == 1024
    for run in (vanilla, looped):
        reached = run["tokens_per_second_per_rank"] * run["flops_per_token"]
        assert run["flops_per_second_per_rank"] == pytest.approx(reached)
    assert roofline["product_flops_per_second"] > 1e8
    assert roofline["copy_bytes_per_second"] > 1e7

    seconds = document["collectives"]["2"]
    assert seconds["large_bytes"] == 4 * setting["bucket_elements"]
    assert set(seconds) == {"large_bytes", "all_reduce", "all_gather"}
    assert all(
        0 < value < 10 for name in ("all_reduce", "all_gather") for value in seconds[name].values()
    )

    # On a busy machine the two can contradict each other, and forecast refuses them then.
    seconds["all_reduce"] = {"small": 1e-4, "large": 1e-2}
    points = tmp_path / "points.json"
    points.write_text(json.dumps(document))
    told = bench("forecast", str(points), "--hosts", "4", "--link", "10")
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1].startswith("FORECAST, not measured: 2 GPUs a host")


@pytest.mark.launcher
def test_a_run_that_memory_runs_out_on_ended_with_247(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "killed.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(SgtError) as told:
        bench_launch.launch_one("the run", ["killed"], 1, tmp_path / "log")
    cause = "killed by signal 9 (SIGKILL; perhaps by the kernel, for lack of memory)"
    assert str(told.value).startswith(f"the run ended: a rank was {cause}: ")


@pytest.mark.launcher
def test_scaling_measures_one_of_weak_and_strong_alone(tmp_path: Path) -> None:
    run = str(run_file(tmp_path))
    # Long enough to be scraped.
    words = ("--gpus", "2", "--variants", "vanilla", "--micro-batches", "8", "--updates", "15")
    done = bench("scaling", run, *words, "--intervals", "2", "--global-batch", "64", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {kind: one["runs"][0]["global_batch_size"] for kind, one in document.items()} == {
        "weak": 8 * 2 * MICRO_BATCH,
        "strong": 64,
    }
    assert all(one["complete"] for one in document.values())
    # On a busy machine a small message may take longer than a large one, which is refused.
    for seconds in document["weak"]["collectives"]["2"].values():
        if isinstance(seconds, dict):
            seconds.update(zip(sorted(seconds), (1e-2, 1e-4), strict=True))
    points = tmp_path / "points.json"
    points.write_text(json.dumps(document))
    told = bench("forecast", str(points), "--hosts", "4", "--link", "10")
    assert told.returncode == 0, told.stderr


@pytest.mark.launcher
def test_a_bench_that_is_stopped_loses_its_runs_or_leaves_one_behind(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    words = ("--variants", "vanilla", "attention_loop:1", "--intervals", "40", "--scratch", scratch)
    with subprocess.Popen(
        [sys.executable, "-m", "sgt_ds", "bench", "train", run_file(tmp_path), *words, "--json"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as running:
        wait_for_step(scratch / "attention_loop-1-1-0", 1)
        running.terminate()
        printed, _ = running.communicate(timeout=60)
    assert running.returncode == 143
    document = json.loads(printed)
    assert not document["complete"]
    assert [run["variant"] for run in document["runs"]] == ["vanilla"]
    left = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # ended meanwhile
            left += [file] if str(scratch) in file.read_text() else []
    assert left == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--variants", "vanilla", "sgt:0"), "--variants: 'sgt:0'"),
        (("--variants", "sgt:1", "--heads", "9"), "growth.stages"),
        (("--global-batch", "3"), "--global-batch: 3"),
        (("--num-gpus", "2", "2"), "--num-gpus: names one twice"),
        (
            ("--variants", "vanilla", "training.compile=false"),
            "--variants: 'training.compile=false' is an override; overrides go directly after RUN",
        ),
        (("--num-gpus", "1", "seed=3", "--json"), "--num-gpus: 'seed=3' is an override; overrides"),
        (("telemetry={enabled: false}",), "telemetry.enabled: is set by the benchmark itself"),
        (("growth.loops=2", "--variants", "vanilla", "sgt:1"), "growth.loops: is set by the"),
        (("--scratch", "/proc/none"), "--scratch: /proc/none cannot be created"),
        (("--scratch", "data"), "--scratch: data"),
    ],
)
def test_bad_usage_of_the_bench_starts_a_run_or_prints_a_traceback(
    words: tuple[str, ...], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = bench("train", str(run), *words)
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert named in lines[0]


@pytest.mark.parametrize(
    ("disk_is_full", "fails"), [(False, False), (False, True), (True, False), (True, True)]
)
@pytest.mark.parametrize("words", [("train", "--num-gpus", "1"), ("scaling", "--gpus", "1")])
def test_a_reader_that_is_gone_leaves_the_runs_folder_or_hides_why_they_failed(
    words: tuple[str, ...],
    disk_is_full: bool,
    fails: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def made(setting: Any, scratch: Path) -> Iterator[RunFigures]:
        (scratch / "run").mkdir(parents=True)
        yield figures("vanilla", 1, 10.0)
        if fails:
            raise SgtError("the second run ended with 1")

    monkeypatch.setattr(sgt_ds.launch, "bench_runs", made)
    monkeypatch.setattr(sgt_ds.launch, "bench_roofline", lambda *_: {})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "made"))
    (tmp_path / "made").mkdir()
    run = str(run_file(tmp_path))
    reader, writer = os.pipe()
    os.close(reader)
    if disk_is_full:
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    with suppress(OSError), os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        status = main(["bench", words[0], run, *words[1:], "--json"])
    assert status == (1 if fails or disk_is_full else 141)
    told = capsys.readouterr().err
    assert ("the second run ended with 1" in told) == fails
    full = "sgt-ds: stdout: cannot be written (No space left on device); free disk space"
    assert (full in told) == (disk_is_full and not fails)
    assert len(list((tmp_path / "made").iterdir())) == fails, "what failed is there to be read"


@pytest.mark.parametrize(
    ("words", "intervals"),
    [(("sgt:2", "--updates", "1"), 2), (("sgt:2", "--updates", "2"), 1), (("--updates", "1"), 1)],
)
def test_what_the_second_update_compiles_is_timed(
    words: tuple[str, ...], intervals: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = []

    def made(setting: Any, scratch: Path) -> Iterator[RunFigures]:
        settings.append(setting)
        yield figures("vanilla", 1, 10.0)

    monkeypatch.setattr(sgt_ds.launch, "bench_runs", made)
    monkeypatch.setattr(sgt_ds.launch, "bench_roofline", lambda *_: {})
    command = ["bench", "train", str(run_file(tmp_path)), "--json", "--variants", "vanilla", *words]
    assert main(command) == 0
    assert [setting.warm_up for setting in settings] == [intervals]


def figures(variant: str, ranks: int, speed: float) -> RunFigures:
    nothing: dict[str, Any] = {"rank_spread_ratio": 0.0, "growth_collective_seconds": 0.0}
    return RunFigures(
        *(variant, ranks, 0, 8, 1.0, (1.0, 1.0), speed, 100.0, None),
        **nothing,
        parts={},
        checkpoint_seconds=0.0,
        peak_memory_bytes=None,
    )


def test_a_run_without_its_base_takes_the_others_ratios_along() -> None:
    measured = [figures("vanilla", 2, 10.0), figures("sgt:1", 2, 8.0), figures("vanilla", 1, 20.0)]
    scaling = [run.scaling_ratio for run in with_ratios(measured)]
    assert scaling == [0.5, 1.0, 1.0]


@pytest.mark.parametrize("hidden", ["", " , "])
def test_gpus_that_are_hidden_are_taken_or_missed_where_there_are_none(
    hidden: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    monkeypatch.setattr(bench_launch, "gpus_here", lambda: 8)
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES: is set but names no GPU"):
        gpu_arguments(2)
    monkeypatch.setattr(bench_launch, "gpus_here", lambda: 0)
    assert gpu_arguments(2) == ("--num_gpus", "2")


def test_gpus_that_only_the_last_run_lacks_are_told_after_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    scratch = tmp_path / "scratch"
    words = ("--num-gpus", "1", "2", "--variants", "vanilla", "--scratch", str(scratch))
    done = bench("train", str(run_file(tmp_path)), *words)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "CUDA_VISIBLE_DEVICES: does not list 2 GPUs" in line
    assert not scratch.exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"runs": []}'])
def test_a_forecast_from_something_else_prints_a_traceback(text: str, tmp_path: Path) -> None:
    points = tmp_path / "points.json"
    points.write_text(text)
    done = bench("forecast", str(points))
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert str(points) in done.stderr
