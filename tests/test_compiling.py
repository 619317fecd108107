"""What was compiled, kept for another machine."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor.utils import clear_caches

from sgt_ds.errors import UserError
from sgt_ds.training import Ranks
from sgt_ds.training.compiling import CompileCache

CPU = torch.device("cpu")


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    store = dist.HashStore()
    dist.init_process_group(
        "gloo", store=store, rank=0, world_size=1, timeout=datetime.timedelta(seconds=60)
    )
    yield Ranks(0, 0, 1, CPU, dist.group.WORLD)
    dist.destroy_process_group()


def test_another_machine_compiles_again_or_a_damaged_file_ends_the_run(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compiled_on(machine: str, cache: CompileCache) -> tuple[int, int, set[str]]:
        """Hits, misses, and new libraries where nothing but the kept file is known."""
        local = tmp_path / machine
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(local))
        clear_caches()
        torch._dynamo.reset()
        cache.load()
        there = {path.name for path in local.rglob("*.so")}
        before = dict(counters["inductor"])
        assert torch.compile(lambda x: x.sin() + 1)(torch.zeros(3)).tolist() == [1, 1, 1]
        hits, misses = (
            counters["inductor"][name] - before.get(name, 0)
            for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")
        )
        return hits, misses, {path.name for path in local.rglob("*.so")} - there

    cache = CompileCache(tmp_path / "kept", ranks)
    hits, misses, libraries = compiled_on("first", cache)
    assert (hits, misses) == (0, 1)
    assert libraries
    assert not cache.file.exists()
    cache.keep()
    content = cache.file.read_bytes()
    assert compiled_on("second", cache) == (1, 0, set())
    cache.keep()
    assert cache.file.read_bytes() == content, "nothing new, and written again"
    cache.file.write_bytes(content[: len(content) // 2])
    assert compiled_on("third", cache)[:2] == (0, 1)
    assert "cannot be read" in caplog.text


def test_code_from_a_folder_of_another_user_is_run(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"sgt-ds-compiled-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"sgt-ds-compiled-{os.getuid()}").chmod(0o777)
    with pytest.raises(UserError, match="not this user's alone"):
        CompileCache(tmp_path / "kept", ranks).load()
