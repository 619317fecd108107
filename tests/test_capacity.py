"""The warning of a run that its device cannot hold."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from forked import Nursery

from sgt_ds.cli import main
from sgt_ds.config import TrainingConfig
from sgt_ds.flops import Memory
from sgt_ds.training import capacity
from sgt_ds.training.engine import Ranks

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
    own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    share = (2**30 if limit and limit.strip().isdigit() else own) // ranks
    capacity.say_what_memory_lacks(planned(share), TrainingConfig(), CPU, ranks)
    assert not caplog.records
    capacity.say_what_memory_lacks(planned(share + 1), TrainingConfig(), CPU, ranks)
    capacity.say_what_memory_lacks(planned(share + 1), CHECKPOINTED, CPU, ranks)
    first, second = (record.getMessage() for record in caplog.records)
    assert f"its share of this host has {share / 2**30:.1f} GiB" in first
    assert "training.activation_checkpointing: true" in first
    assert "activation_checkpointing" not in second


@pytest.mark.parametrize("empty", [None, "", "0"])
@pytest.mark.parametrize(
    "name", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", None]
)
def test_ranks_of_one_launcher_each_take_the_whole_host_for_theirs(
    name: str | None, empty: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name: torchrun, DeepSpeed's launcher, mpirun; None: a process that none started.

    `empty`: what the other names hold.
    """
    for other in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(other, raising=False)
        if empty is not None:
            monkeypatch.setenv(other, empty)
    if name is not None:
        monkeypatch.setenv(name, "3")
    group: Any = None
    assert Ranks(0, 0, 6, CPU, group).local_size == (1 if name is None else 3)


def test_two_ranks_with_room_for_one_and_a_half_start_without_a_word(
    tmp_path: Path, nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    data = runs.write_data(tmp_path / "data")
    file = runs.write_run(tmp_path / "run.yaml", data, training={"steps": 1})
    assert main(["plan", str(file), "--world-size", "2", "--json"]) == 0
    needed = json.loads(capsys.readouterr().out)["memory_bytes"]["total"]
    limit, warnings = tmp_path / "memory.max", []
    for ranks_of_room in (2.5, 1.5):
        limit.write_text(f"{int(ranks_of_room * needed)}\n")
        fault = json.dumps({"memory_limit": str(limit)})
        log = tmp_path / f"{ranks_of_room}.log"
        told = nursery.start(log, [fault, file], ranks=2, entry="faulty:main").end()
        warnings.append(re.findall("memory: a rank needs .* and its share of this host", told))
    assert list(map(len, warnings)) == [0, 1]
