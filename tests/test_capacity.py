"""The warning of a run that its device cannot hold."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from sgt_ds.config import TrainingConfig
from sgt_ds.flops import Memory
from sgt_ds.training import capacity

CPU = torch.device("cpu")
CHECKPOINTED = TrainingConfig(activation_checkpointing=True)


def planned(size: int) -> Memory:
    first, *others = (field.name for field in fields(Memory))
    return Memory(**{first: size, **dict.fromkeys(others, 0)})


@pytest.mark.parametrize("limit", [None, "max\n", f"{2**30}\n"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_too_large_for_its_share_of_the_host_starts_without_a_word(
    limit: str | None,
    ranks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`limit`: what a container's cgroup says; without one the host's own memory counts."""
    file = tmp_path / "memory.max"
    if limit is not None:
        file.write_text(limit)
    monkeypatch.setattr(capacity, "_LIMIT", file)
    monkeypatch.setenv("LOCAL_SIZE", str(ranks))
    own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    share = (2**30 if limit and limit.strip().isdigit() else own) // ranks
    capacity.say_what_memory_lacks(planned(share), TrainingConfig(), CPU)
    assert not caplog.records
    capacity.say_what_memory_lacks(planned(share + 1), TrainingConfig(), CPU)
    capacity.say_what_memory_lacks(planned(share + 1), CHECKPOINTED, CPU)
    first, second = (record.getMessage() for record in caplog.records)
    assert f"its share of this host has {share / 2**30:.1f} GiB" in first
    assert "training.activation_checkpointing: true" in first
    assert "activation_checkpointing" not in second
