"""A run that goes on with other numbers of ranks, in the middle of growth, is the same run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import runs
from forked import Nursery

from sgt_ds.checkpoints import read_state
from sgt_ds.training import roll_back

STEPS = 20


def growth(run_dir: Path) -> list[tuple[Any, ...]]:
    """Θ throughout: what each decision led to, and by which rule."""
    return [
        (line["step"], line["rule"], line["loops"], line["phase"])
        for line in runs.journal_lines(run_dir)
        if line["type"] == "decision"
    ]


def test_two_ranks_then_one_then_four_then_two_lose_or_grow_otherwise(
    tmp_path: Path, nursery: Nursery
) -> None:
    data = runs.write_data(tmp_path / "data")
    settings: dict[str, Any] = {
        "growth": {"t_start": 4, "interval": 4},
        "training": {"steps": STEPS},
        "checkpoint": {"every": 1, "keep_last": STEPS},
        "telemetry": {"enabled": False},
    }
    whole = runs.write_run(tmp_path / "whole.yaml", data, **settings)
    nursery.start(tmp_path / "log", [whole], ranks=2).end()
    before = tmp_path / "whole"
    # Each goes on from the one before it: inside the entry of a layer, and of a depth.
    for name, ranks, step in (("one", 1, 6), ("four", 4, 11), ("two", 2, 15)):
        file = runs.write_run(tmp_path / f"{name}.yaml", data, **settings)
        shutil.copytree(before, tmp_path / name)
        assert roll_back(tmp_path / name, step).step == step
        told = nursery.start(tmp_path / "log", [file], ranks=ranks).end()
        assert "repartitioned for" in told
        before = tmp_path / name
    expected, found = runs.losses(tmp_path / "whole"), runs.losses(before)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert max(abs(found[step] - expected[step]) for step in expected) < 1e-6
    assert growth(before) == growth(tmp_path / "whole")
    assert {line[1] for line in growth(before)} >= {"activate", "deepen"}
    ends = [
        read_state(directory / "checkpoints" / f"step-{STEPS:08d}")
        for directory in (before, tmp_path / "whole")
    ]
    # The order of the data, what has been read of them, and what it cost, to the last token.
    for key in (
        "batches",
        "tokens",
        "data_fingerprint",
        "flops",
        "state",
        "entry",
        "skipped_steps",
    ):
        assert ends[0][key] == ends[1][key], key
    worlds = [
        read_state(before / "checkpoints" / f"step-{step:08d}")["world_size"]
        for step in (6, 7, 11, 12, 15, 16)
    ]
    assert worlds == [2, 1, 1, 4, 4, 2]
    runs.check_replay(before)
