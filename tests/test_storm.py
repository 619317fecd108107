"""A handful of the kills that `make storm` deals out by the hundred."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import Nursery
from training_storm import PHASES, Storm


@pytest.mark.parametrize(("ranks", "kills"), [(1, 5), (2, 2)])
def test_a_kill_loses_a_checkpoint_or_changes_a_number(
    tmp_path: Path, nursery: Nursery, ranks: int, kills: int
) -> None:
    storm = Storm(nursery, tmp_path / "storm", ranks, seed=1)
    storm.run(kills, PHASES)
    assert storm.kills.total() == kills
    assert storm.resumed == kills
    assert storm.completed >= 1
