"""`sgt-ds plan`, through the command: the paper's runs, schedules, journals, memory, bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import yaml
from paper_flops import ABLATION, CELLS, MAIN_TABLE, SCHEDULES, flags_of, planned, table
from torch.autograd.graph import saved_tensors_hooks

from sgt_ds.cli import main
from sgt_ds.config import PRESETS, GrowthConfig, ModelConfig
from sgt_ds.flops import FlopsCounter, Layout, memory_per_rank
from sgt_ds.flops.memory import LOGITS_AT_A_TIME
from sgt_ds.growth import (
    Entropy,
    Journal,
    Measurement,
    Passes,
    State,
    build_policy,
    decisions,
    passes_at,
)
from sgt_ds.growth.decision import OPERATOR, freeze
from sgt_ds.launch import Launch
from sgt_ds.model import Transformer, loop_inputs
from sgt_ds.model.loss import CHUNK_ELEMENTS

TINY = ("--preset", "tiny", "--seq-len", "64", "--global-batch", "8", "--steps", "100")
WINDOWS = ("--t-start", "20", "--interval", "10", "--layers", "2", "--k-max", "2")


def run_plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sgt_ds", "plan", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_planned_total_that_departs_from_the_papers_cell() -> None:
    """All 15 cells, through the real policies and the default flags, and the ablation's."""
    for preset, kind in CELLS:
        document = planned(*flags_of(preset, kind))
        printed = MAIN_TABLE[preset][kind][0]
        assert document["total_flops"] / 1e18 == pytest.approx(printed, abs=0.006), (preset, kind)
    for method, (printed, _) in ABLATION.items():
        document = planned("--preset", "573m", "--method", method, "--layers", "7,")
        assert document["total_flops"] / 1e18 == pytest.approx(printed, abs=0.01), method
    assert document["total_flops"] / 1e18 == pytest.approx(87.736, abs=0.001)  # low entropy


def test_command_as_documented_prints_one_json_document() -> None:
    flags = "--preset 573m --method sgt --k-max 3 --vocab-size 50280 --seq-len 4096 --steps 5035"
    more = "--global-batch 1024 --t-start 250 --interval 250 --layers 3 --heads 2 --world-size 16"
    process = run_plan(*flags.split(), *more.split(), "--json")
    assert process.returncode == 0, process.stderr
    document = json.loads(process.stdout)
    assert document["parameters"] == 572769280
    assert document["flops_per_token_vanilla"] == 4138948608
    assert [event["step"] for event in document["events"]] == list(range(250, 2251, 250))
    assert [event["depth"] for event in document["events"]] == [1, 2, 3] * 3
    memory = document["memory_bytes"]
    parts = {"parameters", "gradients", "optimizer", "activations", "logits", "total"}
    assert set(memory) == parts
    assert memory["total"] == sum(memory[name] for name in parts - {"total"})
    # Padded to 50304: 49,152 parameters more. ZeRO-2: master weights and two moments in float32.
    assert memory["parameters"] == 2 * (572769280 + 49152)
    assert memory["optimizer"] == 12 * -(-(572769280 + 49152) // 16)


def test_document_page_that_shows_other_numbers_than_the_command() -> None:
    page = Path(__file__).parents[1] / "docs" / "flops.md"
    assert table() in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("method", "count", "k_max"),
    # One layer, one deep: its window of all heads ends where nothing is decided.
    [("sgt", 2, 2), ("sgt", 1, 1), ("high_entropy_loop", 2, 2), ("block_loop", 2, 2)],
)
@pytest.mark.parametrize("entry", ["decay", "none", "ramp"])
def test_plan_that_counts_other_updates_than_training_does(
    method: str, count: int, k_max: int, entry: str
) -> None:
    """Summed update by update, as the trainer does it: decide at t, act from update t + 1 on."""
    model = PRESETS["tiny"]
    given = {
        "sgt": (*WINDOWS[:4], "--k-max", str(k_max), "--entry", entry),
        "high_entropy_loop": (*WINDOWS[:4], "--stages", "3,1", "--entry", entry),
        "block_loop": (),
    }
    size = ("--method", method, "--layers", str(count))
    document = planned(*TINY, *size, *given[method])
    layers: Any = count if method == "sgt" else [1, 2]
    growth = GrowthConfig(
        k_max=k_max, layers=layers, heads=2, t_start=20, interval=10, entry=entry, stages=[3, 1]
    )
    policy = build_policy(method, growth, model)
    changes = {event["step"] for event in document["events"]}
    counter, state = FlopsCounter(model, 64), policy.initial_state()
    rising = tuple(tuple((n + 1) / 8 - h / 100 for h in range(4)) for n in range(6))
    for step in range(100):
        counter.add(8 * 64, passes_at(state, step, entry=policy.entry, interval=10, num_heads=4))
        if policy.is_due(step + 1, state):
            decision = policy.decide(step + 1, Entropy(rising, rising), state)
            assert decision.after == state or step + 1 in changes
            state = decision.after
    assert document["total_flops"] == counter.total
    assert document["overhead_ratio"] == counter.overhead_ratio
    last = document["segments"][-1]
    assert (last["end"], last["flops_per_token"]) == (100, counter.per_token)


def test_schedules_in_another_order_than_their_names_say() -> None:
    latest = planned(*TINY, *WINDOWS, "--schedule", "latest")
    cases = latest["cases"]
    # Due at 20, 30, …, 100; four changes are needed, and one at 100 would act in no update.
    assert cases["earliest"]["last_change"] == 50
    assert [event["step"] for event in latest["events"]] == [60, 70, 80, 90]
    assert (
        latest["total_flops"] == cases["latest"]["total_flops"] < cases["earliest"]["total_flops"]
    )
    lower = planned(*TINY, *WINDOWS, "--schedule", "lower")
    assert [event["step"] for event in lower["events"]] == [20]
    assert 0 < lower["overhead_ratio"] < cases["earliest"]["overhead_ratio"]
    # Another order of growth costs the same; the layers come from the other end.
    mirrored = planned(*TINY, *WINDOWS, "--direction", "s2d", "--exclude-layers", "0,1")
    assert [event["layer"] for event in mirrored["events"]] == [2, 2, 3, 3]
    assert mirrored["total_flops"] == cases["earliest"]["total_flops"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--steps", "50"), "before training ends: it needs more than 50 steps"),
        (("--freeze-at", "50"), "before freeze_at 50"),
        (("--entropy-every", "4", "--interval", "12", "--t-start", "21"), "no window is measured"),
        (("--steps", "51"), None),
        (("--freeze-at", "51"), None),
        (("--entropy-every", "20"), None),
    ],
)
def test_schedule_that_cannot_finish_without_a_warning(
    flags: tuple[str, ...], told: str | None
) -> None:
    warnings = planned(*runs.with_defaults((*TINY, *WINDOWS), *flags))["warnings"]
    assert [told in warning for warning in warnings] == ([] if told is None else [True])


def test_a_warning_of_the_plan_that_training_does_not_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs.write_run(tmp_path / "run.yaml", runs.write_data(tmp_path), run_dir=str(tmp_path))
    late = ("growth.t_start=40", "optimizer.warmup_steps=20", f"run_dir={tmp_path / 'run'}")
    assert main(["plan", str(run), *late, "--json"]) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert ["growth can't finish" in warnings[0], "never decays" in warnings[1]] == [True, True]
    assert main(["config", str(run), *late]) == 0
    told = capsys.readouterr()
    assert told.err.splitlines() == [f"sgt-ds config: warning: {each}" for each in warnings]
    assert yaml.safe_load(told.out)["optimizer"]["warmup_steps"] == 20

    def restarted_once(prepare: Callable[[Sequence[str]], Launch], **_: object) -> int:
        return len({prepare(()).target, prepare(["resume=auto"]).target}) - 1

    monkeypatch.setattr("sgt_ds.launch.supervise", restarted_once)
    assert main(["train", str(run), *late]) == 0
    told = capsys.readouterr()
    assert told.err.splitlines() == [f"sgt-ds train: warning: {each}" for each in warnings]


def test_journal_whose_growth_the_plan_does_not_follow(tmp_path: Path) -> None:
    """The layer that is chosen leaves the candidates: the journal's run stalls, so must the plan."""
    model, path = PRESETS["tiny"], tmp_path / "growth.jsonl"
    growth = GrowthConfig(k_max=2, layers=2, heads=2, t_start=20, interval=10, entropy_ema=0.0)
    header = {
        "type": "header",
        "format": 1,
        "method": "sgt",
        "growth": growth.model_dump(mode="json"),
        "model": model.model_dump(mode="json"),
        "sequence_length": 64,
        "global_batch_size": 8,
        "steps": 100,
    }
    lines = []
    with Journal.create(path, header) as journal:
        for step in range(1, 61):
            high = (1, 2) if step < 30 else (4, 5)
            row = tuple((0.9 if n in high else 0.1,) * 4 for n in range(6))
            lines.append(Measurement(step, row, tuple((0.01,) * 4 for _ in range(6)), 8))
            journal.measure(lines[-1])
    done = [d for d in decisions(lines, build_policy("sgt", growth, model), 0.0) if d.changes_loops]
    assert [d.step for d in done] == [20]
    document = planned("--journal", str(tmp_path))
    assert document["schedule"] == "journal"
    assert [(e["step"], e["layer"], e["heads"]) for e in document["events"]] == [(20, 2, [0, 1])]
    assert any("ends at step 60 of 100" in warning for warning in document["warnings"])
    # Where a person froze the run, its own plan ends too; another policy's does not.
    with Journal.open_or_create(path, {}) as journal:
        journal.cut_back(14)
        journal.decision(freeze(14, f"{OPERATOR}: growth was frozen on request", State()), 0)
        for line in lines[14:]:
            journal.measure(line)
    assert planned("--journal", str(tmp_path))["events"] == []
    # A flag asks what another policy would have done with the same entropies.
    other = planned("--journal", str(path), "--direction", "s2d")
    assert [(e["step"], e["layer"]) for e in other["events"]] == [(20, 1), (30, 4), (40, 4)]
    # A decision that goes on from one that is not there.
    with Journal.open_or_create(path, {}) as journal:
        journal.decision(replace(done[0], step=70, before=done[0].after), 0)
    gap = run_plan("--journal", str(path))
    assert gap.returncode == 2
    assert gap.stderr.startswith(f"sgt-ds: {path}: step 70: lines before it are missing")


def test_run_configuration_whose_values_the_plan_ignores(tmp_path: Path) -> None:
    deepspeed = tmp_path / "ds.json"
    deepspeed.write_text('{"zero_optimization": {"stage": 1}}', encoding="utf-8")
    run = tmp_path / "run.yaml"
    run.write_text(
        "preset: tiny\n"
        "growth: {k_max: 2, layers: 2, t_start: 20, interval: 10}\n"
        "data: {train: [{path: shards}], sequence_length: 64}\n"
        "training: {steps: 100, global_batch_size: 8, micro_batch_size: 2, compile: false}\n"
        f"deepspeed: {deepspeed}\nrun_dir: {tmp_path / 'out'}\n",
        encoding="utf-8",
    )
    process = run_plan(str(run), "--world-size", "2", "--json", "training.steps=90")
    assert process.returncode == 0, process.stderr
    document = json.loads(process.stdout)
    expected = planned(*runs.with_defaults((*TINY, *WINDOWS), "--steps", "90"))
    assert document["total_flops"] == expected["total_flops"]
    assert document["layout"] | {"reduce_bucket_size": 0} == {
        "world_size": 2,
        "micro_batch_size": 2,
        "zero_stage": 1,
        "precision": "fp32",
        "compiled": False,
        "activation_checkpointing": False,
        "fp8": False,
        "reduce_bucket_size": 0,
        "overlap_comm": False,
    }


def test_data_that_training_would_refuse_are_planned_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = runs.write_data(tmp_path / "data")
    run = str(runs.write_run(tmp_path / "run.yaml", data, telemetry={"enabled": False}))
    for override in ("model.vocab_size=299", "data.sequence_length=30000"):
        told = []
        for verb in ("train", "plan"):
            assert main([verb, run, override]) == 2
            told.append(capsys.readouterr().err)
        assert told[0] == told[1] != ""
    assert main(["plan", run, "--seq-len", "30000"]) == 2
    assert "30000 needs shards of 30001 tokens" in capsys.readouterr().err
    shard = next((data / "train").glob("*.tokens"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-8])
    assert main(["plan", run]) == 2
    assert f"{shard}: data.train.0.path: holds {len(content) - 8} bytes" in capsys.readouterr().err


def test_data_on_another_machine_stop_a_plan_or_go_unsaid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = runs.write_data(tmp_path / "data")
    run = str(runs.write_run(tmp_path / "run.yaml", data))

    def warnings(*overrides: str) -> list[str]:
        assert main(["plan", run, *overrides]) == 0
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if line.startswith("warning: data.")]

    remedy = "`sgt-ds train` needs it, and checks then whether it fits the model"
    assert warnings() == []
    assert warnings("data.train=[{path: s3://nowhere/set}]", "data.validation=null") == []
    shard = max((data / "train").glob("*.tokens"))
    shard.unlink()
    assert warnings() == [f"warning: data.train.0.path: {shard} is not on this machine; {remedy}"]
    told = f"warning: data.train.0.path: a is not on this machine (and 2 more); {remedy}"
    assert warnings("data.train=[{path: a}, {path: b}]", "data.validation=c") == [told]
    # What is here is held against the model all the same.
    assert main(["plan", run, "data.train=[{path: a}]", "model.vocab_size=299"]) == 2


def test_a_flag_and_an_override_of_one_key_of_which_one_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(runs.write_run(tmp_path / "run.yaml", runs.write_data(tmp_path)))
    for flags in (
        ["--k-max", "1", "growth.k_max=3"],
        ["--preset", "demo", "model.num_heads=2"],
        ["--no-compile", "training.compile=true"],
    ):
        assert main(["plan", run, *flags]) == 2
        told = f"command line: {flags[0]}: conflicts with {flags[-1]}"
        assert told in capsys.readouterr().err
    # What training would refuse is planned, and said.
    assert main(["plan", run, "--method", "block_loop", "training.steps=100"]) == 0
    text = capsys.readouterr().out
    assert "warning: training by block_loop takes growth.layers as a list" in text
    assert "the one rank at its peak" in text
    assert "ranks is assumed; set it with --world-size" in text
    assert main(["plan", run, "--method", "block_loop", "--layers", "7,"]) == 2


def test_time_and_cost_from_the_users_figures() -> None:
    flags = ("--mfu", "0.5", "--peak-tflops", "1000", "--price-per-gpu-hour", "2")
    document = planned("--preset", "573m", "--world-size", "4", *flags)
    hours = document["total_flops"] / 0.5e15 / 3600
    assert document["time"]["gpu_hours"] == pytest.approx(hours)
    assert document["time"]["seconds"] == pytest.approx(hours * 3600 / 4)
    assert document["time"]["cost"] == pytest.approx(2 * hours)
    text = run_plan("--preset", "573m", "--world-size", "4", *flags).stdout
    assert "49.4 GPU-hours, cost 98.85" in text


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--heads 20", "command line: --heads: 20 exceeds the model's 16; set 16 or fewer"),
        ("--preset 573", "--preset: '573' is unknown"),
        ("--method sgd", "--method: 'sgd' is unknown"),
        ("--layers 16", "--layers: 16 exceeds the 15 eligible layers"),
        ("--method block_loop --layers 3,3", "--layers: a layer is listed twice"),
        (
            "--world-size 3",
            "--world-size: 3 ranks do not divide the 1024 sequences of an update; give 2 or 4",
        ),
        ("--loops 3", "command line: --loops: does nothing under method sgt; leave it out, or"),
        ("--method vanilla --k-max 2", "--k-max: does nothing under method vanilla; leave it"),
        ("--mfu 0.4", "--peak-tflops: is missing"),
        ("--mfu 40 --peak-tflops 1", "--mfu: '40' is not a number above 0, at most 1"),
        ("--interval 0", "--interval: '0' is not a whole number from 1"),
        ("growth.k_max=2", "an override, which needs RUN.yaml before it"),
        ("nowhere.yaml", "nowhere.yaml: no such configuration file"),
        ("--journal nowhere.jsonl", "nowhere.jsonl: no such journal"),
    ],
)
def test_bad_input_that_is_not_told_in_one_line(
    flags: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["plan", *flags.split()])
    except SystemExit as ended:  # argparse's own complaints
        status = ended.code  # type: ignore[assignment]
    output = capsys.readouterr()
    assert (status, output.out) == (2, "")
    assert told in output.err
    assert output.err.count("\n") == 1


HEADS_2 = Passes(1, "attention", (0, 1), None)
ALL = Passes(1, "attention", None, ((0.5,) * 16,))
BLOCK = Passes(1, "block", None, None)

# Measured: bytes a token that one H200 had allocated above weights at the peak of forward and
# backward of sgt_ds.model, 573m at 2 × 4096 tokens with a vocabulary of 128 (torch 2.11, CUDA 13);
# layers, compiled, checkpointed, precision, what three layers loop.
MEASURED = [
    (16, False, False, "bf16", None, 1510546),
    (4, False, False, "bf16", None, 403749),
    (4, False, False, "fp32", None, 758048),
    (16, False, True, "bf16", None, 159818),
    (16, False, False, "bf16", HEADS_2, 1534776),
    (16, False, False, "bf16", ALL, 1572960),
    (16, False, False, "bf16", BLOCK, 1787246),
    (16, True, False, "bf16", None, 1184898),
    (4, True, False, "fp32", None, 631072),
    (16, True, True, "bf16", None, 139337),
    (16, True, False, "bf16", HEADS_2, 1202983),
    (16, True, False, "bf16", ALL, 1241167),
    (16, True, False, "bf16", BLOCK, 1400155),
]


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: str(row[:4]))
def test_activations_that_depart_from_what_a_gpu_allocated(row: tuple[Any, ...]) -> None:
    layers, compiled, checkpointed, precision, own, measured = row
    model = PRESETS["573m"].model_copy(update={"num_layers": layers, "vocab_size": 128})
    layout = Layout(
        micro_batch_size=2,
        precision=precision,
        compiled=compiled,
        activation_checkpointing=checkpointed,
        reduce_bucket_size=50_000_000,
    )
    passes = {} if own is None else dict.fromkeys((1, 2, 3), own)
    memory = memory_per_rank(model, 4096, layout, [passes])
    estimate = (memory.activations + memory.logits) / (2 * 4096)
    assert estimate == pytest.approx(measured, rel=0.04)


HEADS_2_DEEP_3 = Passes(3, "attention", (0, 1), None)

# Measured: GiB that one H200 had allocated at the peak of real updates under DeepSpeed 0.19.8 on
# one rank, 4096 positions, two buckets of 50M elements, when attention's result was still copied
# (2% more): preset, micro-batch, compiled, checkpointed, ZeRO stage, precision, what three layers
# loop.
ENGINE = [
    ("275m", 4, True, False, 2, "bf16", None, 15.750),
    ("275m", 8, True, False, 2, "bf16", None, 24.804),
    ("573m", 4, True, False, 2, "bf16", HEADS_2_DEEP_3, 29.224),
    ("573m", 4, True, True, 2, "bf16", None, 11.970),
    ("573m", 1, True, True, 2, "bf16", None, 10.430),
    ("573m", 4, False, False, 2, "bf16", None, 38.057),
    ("573m", 4, False, True, 2, "bf16", None, 15.945),
    ("573m", 4, True, True, 1, "bf16", None, 12.785),
    ("573m", 2, True, True, 2, "fp32", None, 15.469),
    ("573m", 2, False, False, 2, "fp32", None, 36.100),
    ("573m", 2, True, True, 1, "fp32", None, 15.277),
    ("573m", 2, True, True, 0, "fp32", None, 11.100),
    ("1.2b", 2, True, False, 2, "bf16", HEADS_2_DEEP_3, 35.108),
]


@pytest.mark.parametrize("row", ENGINE, ids=lambda row: "-".join(map(str, row[:6])))
def test_peak_that_departs_from_what_training_allocated(row: tuple[Any, ...]) -> None:
    preset, micro_batch, compiled, checkpointed, stage, precision, own, measured = row
    layout = Layout(
        world_size=1,
        micro_batch_size=micro_batch,
        zero_stage=stage,
        precision=precision,
        compiled=compiled,
        activation_checkpointing=checkpointed,
        reduce_bucket_size=50_000_000,
    )
    passes = {} if own is None else dict.fromkeys((1, 2, 3), own)
    memory = memory_per_rank(PRESETS[preset], 4096, layout, [passes])
    assert memory.total / 2**30 == pytest.approx(measured, rel=0.05)


def test_estimate_that_knows_another_loss_or_another_deepspeed_file() -> None:
    assert LOGITS_AT_A_TIME == CHUNK_ELEMENTS
    path = Path(__file__).parents[1] / "ds_configs" / "zero2_bf16.json"
    zero = json.loads(path.read_text(encoding="utf-8"))["zero_optimization"]
    assert Layout.reduce_bucket_size == zero["reduce_bucket_size"]
    assert Layout.overlap_comm == zero["overlap_comm"]


@pytest.mark.parametrize(
    "own",
    [
        None,
        Passes(2, "attention", (0, 3), None),
        Passes(2, "attention", (0, 2, 3), None),
        BLOCK,
    ],
)
def test_activations_that_depart_from_what_the_model_keeps(own: Passes | None) -> None:
    """The model of today, eager, on a CPU: all that autograd holds, each storage once."""
    model = ModelConfig(
        hidden_size=128, intermediate_size=512, num_layers=5, num_heads=4, vocab_size=128
    )
    width, sequences, positions = 128, 2, 1024
    network = Transformer(model)
    weights = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    def norms(run: Passes) -> int:
        if run.scope == "block":
            return 2
        return int(run.depth == 1 or run.head_count(4) > 2)  # else in the heads' own space

    passes = {} if own is None else {1: own, 2: own}
    ids = torch.randint(128, (sequences, positions + 1))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        network(ids[:, :-1], ids[:, 1:], loops=loop_inputs(passes, torch.device("cpu")))
    held = sum(storage.nbytes() for storage in kept.values()) / (sequences * positions)

    layout = Layout(micro_batch_size=sequences, precision="fp32", compiled=False)
    memory = memory_per_rank(model, positions, layout, [passes])
    # The peak is in the first block that is run backwards. Before, after the forward pass, neither
    # its working set is there nor the loss's gradients, but the log-probabilities are.
    estimate = memory.activations / (sequences * positions) - 2 * 512 * 4 + 4 * 128
    # A CPU has no kernel for the norm: of its element-wise parts one result more is kept.
    extra_norms = sum(run.depth * norms(run) for run in passes.values())
    estimate += 4 * width * (11 + extra_norms)
    assert held == pytest.approx(estimate, rel=0.01)


def test_longer_windows_that_cost_less() -> None:
    """The paper's schedules: a longer window computes all heads of a new layer for longer, which
    outweighs the looping that a later start saves.
    """
    totals = []
    for window in SCHEDULES:
        flags = (*flags_of("275m", 1), "--t-start", str(window), "--interval", str(window))
        document = planned(*flags)
        assert [event["step"] for event in document["events"]] == [window, 2 * window, 3 * window]
        totals.append(document["total_flops"])
    assert totals == sorted(totals)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_stdout_is_a_traceback_or_no_fault(unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "sgt_ds", "plan", "--preset", "573m"],
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith("sgt-ds: stdout: cannot be written (No space left on device); ")


FAILING = """
import socket, sys
from sgt_ds.cli.frame import Parser, add_command, run_command

def handler(options):
    print("printed")
    if sys.argv[1] == "socket":
        end, other = socket.socketpair()
        other.close()
        end.send(b"x")
    raise {"crash": RuntimeError("the fault"), "interrupt": KeyboardInterrupt()}[sys.argv[1]]

parser = Parser(prog="sgt-ds")
add_command(parser.add_subparsers(), "verb", "help", "example", handler)
sys.exit(run_command(parser, ["verb"]))
"""


@pytest.mark.parametrize("disk_is_full", [False, True])
@pytest.mark.parametrize(
    ("how", "status", "told"),
    [
        ("crash", 1, "RuntimeError: the fault\n"),
        ("interrupt", 130, "sgt-ds: interrupted\n"),
        ("socket", 1, "BrokenPipeError: [Errno 32] Broken pipe\n"),
    ],
)
def test_a_full_disk_or_a_reader_that_is_gone_hides_how_a_command_failed(
    how: str, status: int, told: str, disk_is_full: bool
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    if disk_is_full:
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    done = subprocess.run(
        [sys.executable, "-c", FAILING, how],
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr.endswith(told)) == (status, True), done.stderr
    assert "Exception ignored" not in done.stderr
