"""Sums of gradients over many ranks: what bf16 loses of them, and that a run says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
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
