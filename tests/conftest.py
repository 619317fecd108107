"""What several test files share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from forked import Nursery

# One test process on a small machine: leave a core to the processes that it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start training runs come first, so that none is left alone at the end."""

    def starts_runs(item: pytest.Item) -> bool:
        launched = item.get_closest_marker("launcher") is not None
        return launched or "nursery" in getattr(item, "fixturenames", ())

    long_files = {item.path for item in items if starts_runs(item)}
    items.sort(key=lambda item: item.path not in long_files)


@pytest.fixture(autouse=True)
def every_run_replays(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """Whatever a test does to a run: its journal leads to its own decisions."""
    yield
    if request.node.get_closest_marker("launcher") is None:
        return
    from runs import check_replay

    for journal in tmp_path.rglob("growth.jsonl"):
        check_replay(journal.parent, ended=False)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Forks ranks of real runs, for tests that start many."""
    from forked import Nursery

    with Nursery() as started:
        yield started
