"""Sums of gradients over many ranks: what bf16 loses of them, and that a run says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sgt_ds.training.engine import BF16_SUM_RANKS, say_what_sums_lose

FILE = Path("ds_configs/zero2_bf16.json")


def ring_error(ranks: int) -> float:
    """Relative error of a mean of gradients that a ring adds up in bf16, one rank after another."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(5000, generator=generator)
    gradients = (common + torch.randn(ranks, 5000, generator=generator)).bfloat16()
    total = torch.zeros(5000, dtype=torch.bfloat16)
    for share in gradients / ranks:
        total += share
    return distance(total, gradients.double().mean(0))


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


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
