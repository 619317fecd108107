"""Sums of gradients over many ranks: what bf16 loses of them, and that a run says so."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import runs
import torch
from rank_sums import ring_error, table

from sgt_ds.training.engine import BF16_SUM_RANKS, say_what_sums_lose

FILE = Path("ds_configs/zero2_bf16.json")


def test_page_that_differs_from_the_sums_as_computed() -> None:
    assert table() in Path("docs/launching.md").read_text(encoding="utf-8")


def test_gradients_of_many_ranks_are_summed_in_bf16_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert ring_error(8) < 0.005
    assert ring_error(BF16_SUM_RANKS) > 0.01
    assert ring_error(1024) > 0.3
    rough = SimpleNamespace(communication_data_type=torch.bfloat16)
    say_what_sums_lose(rough, BF16_SUM_RANKS - 1, FILE)
    say_what_sums_lose(SimpleNamespace(communication_data_type=torch.float32), 4096, FILE)
    assert caplog.messages == []
    say_what_sums_lose(rough, BF16_SUM_RANKS, FILE)
    assert caplog.messages == [
        f"{FILE}: communication_data_type: 256 ranks add up their gradients in bf16, which loses "
        'much of the sum where NCCL uses a ring; set it to "fp32" (twice the traffic)'
    ]


@pytest.mark.parametrize(("added_in", "warns"), [("bf16", True), (None, True), ("fp32", False)])
def test_micro_batches_add_up_in_bf16_without_a_word(
    tmp_path: Path, added_in: str | None, warns: bool
) -> None:
    deepspeed = tmp_path / "ds.json"
    values = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    deepspeed.write_text(json.dumps({**values, "data_types": {"grad_accum_dtype": added_in}}))
    run = runs.write_run(
        tmp_path / "run.yaml",
        runs.write_data(tmp_path / "data"),
        training={"steps": 1},
        deepspeed=str(deepspeed),
    )
    told = runs.run_to_end(runs.single(run))
    warning = (
        f"{deepspeed}: data_types.grad_accum_dtype: the gradients of 4 micro-batches add up in"
    )
    assert (f"{warning} bfloat16" in told) is warns
