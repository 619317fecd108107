"""`sgt-ds bench inference` as a user calls it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest
import torch

import sgt_ds.inference
from sgt_ds.cli import main
from sgt_ds.config import ModelConfig
from sgt_ds.inference import InferenceRow, InferenceSetting
from sgt_ds.inference.bench import Runner, build_models

GPU = torch.cuda.is_available()
SMALL = ["bench", "inference", "--preset", "tiny", "--device", "cpu", "--rounds", "2"]
SMALL += ["--prompt", "8", "--generate", "4"]


def test_a_case_that_is_not_timed_or_not_beside_vanilla(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cases = ["vanilla", "sgt:1", "sgt:3", "block_loop:1"]
    assert main([*SMALL, "--variants", *cases[1:], "--batch", "1", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = document["rows"]
    assert document["complete"]
    assert [(r["case"], r["batch"]) for r in rows] == [(c, b) for b in (1, 2) for c in cases]
    for row in rows:
        assert row["prefill_tokens_per_second"] > 0
        assert row["decode_ratio_quartiles"][0] <= row["decode_ratio"]
    vanilla = [row for row in rows if row["case"] == "vanilla"]
    assert all(row["decode_ratio"] == row["prefill_ratio"] == 1 for row in vanilla)
    assert not document["compiled"]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not GPU, reason="no GPU"))]
)
def test_what_is_timed_is_not_what_generate_says(device: str, batch: int) -> None:
    shape = ModelConfig(
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        vocab_size=128,
        init_std=0.5,  # sharp attention: where a token stands must matter
    )
    setting = InferenceSetting(
        shape,
        variants=("sgt:1", "attention_loop:1", "block_loop:2"),
        layers=1,
        heads=1,
        prompt=4,
        generated=9,
        device=torch.device(device),
        compiled=True,
        backend="inductor" if device == "cuda" else "aot_eager",  # without a C++ compiler
    )
    torch._dynamo.reset()
    for name, model in build_models(setting).items():
        runner = Runner(model, batch, setting)  # fullgraph: a break is an error
        for _ in range(2):  # the second round finds the cache as the first left it
            runner.prefill()
            told = [runner.token.clone()]
            for _ in range(setting.generated - 1):
                runner.decode(1)
                told.append(runner.token.clone())
        said = model.generate(
            runner.ids,
            attention_mask=torch.ones_like(runner.ids),
            do_sample=False,
            max_new_tokens=setting.generated,
            eos_token_id=-1,
            pad_token_id=0,
        )
        assert torch.equal(torch.cat([runner.ids, *told], dim=1), said), name


@pytest.mark.parametrize(
    "flags", [["--heads", "9"], ["--layers", "7"], ["--batch", "0"], ["--variants", "sgt:0"]]
)
def test_bad_usage_is_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main([*SMALL, *flags])
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert flags[0] in line


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_bench_that_is_stopped_loses_its_rows_or_ends_without_a_word(
    number: signal.Signals,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stopped(_: InferenceSetting) -> Iterator[InferenceRow]:
        yield from [InferenceRow("vanilla", 1, 1.0, 2.0, 1.0, 1.0, (1.0, 1.0))] * rows
        if number == signal.SIGINT:  # ignored itself where the tests run in the background
            raise KeyboardInterrupt
        signal.raise_signal(number)

    monkeypatch.setattr(sgt_ds.inference, "bench_inference", stopped)
    try:
        status = main([*SMALL, "--json"])
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    assert status == 128 + number
    told = capsys.readouterr()
    if rows:
        document = json.loads(told.out)
        assert not document["complete"]
        assert [row["decode_tokens_per_second"] for row in document["rows"]] == [2.0]
    else:
        assert not told.out
        assert "there are no rows" in told.err.splitlines()[0]
