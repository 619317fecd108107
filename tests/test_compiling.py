"""What was compiled, kept for another machine."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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


def test_what_a_process_beside_a_rank_has_compiled_is_not_kept(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    cache = CompileCache(tmp_path / "kept", ranks)
    cache.load()
    cache.keep()
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    for number in (1, 2):
        graph = folder / "fxgraph" / "xx" / f"key{number}"
        graph.mkdir(parents=True)
        (graph / "whole").write_text("a graph")
        (graph / ".7.8.tmp").write_text("half of one")  # as torch names what it still writes
        cache.keep(number)
        with zipfile.ZipFile(cache.file) as kept:
            assert f"fxgraph/xx/key{number}/whole" in kept.namelist()
            assert not [name for name in kept.namelist() if name.endswith(".tmp")]
    # The rank has found one of them, and written how it is best run here.
    (folder / "ab").mkdir()
    (folder / "ab" / "kernel.best_config").write_text("a form")
    monkeypatch.setitem(counters["inductor"], "fxgraph_cache_hit", 10_000)
    cache.keep(2)
    with zipfile.ZipFile(cache.file) as kept:
        assert "ab/kernel.best_config" in kept.namelist()


def test_code_from_a_folder_of_another_user_is_run(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"sgt-ds-compiled-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"sgt-ds-compiled-{os.getuid()}").chmod(0o777)
    with pytest.raises(UserError, match="is not a private folder of this user"):
        CompileCache(tmp_path / "kept", ranks).load()


def graphs(file: Path) -> set[str]:
    """Keys of the graphs that a kept file holds."""
    with zipfile.ZipFile(file) as kept:
        names = [name.split("/") for name in kept.namelist()]
    return {parts[2] for parts in names if parts[0] == "fxgraph"}


def on_each_host(rank: int, folder: str) -> None:
    """What the spawned process does: one rank of one host, whose user shares torch's folder."""
    place = Path(folder)
    users = place / f"host-{rank}"
    users.mkdir()
    (users / "other.main.so").write_text("of another program")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(users)
    store = dist.FileStore(str(place / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    cache = CompileCache(place / "kept", Ranks(rank, 0, 2, CPU, dist.group.WORLD))
    cache.load()

    def compiles(size: int) -> None:
        """A graph without a kernel in C++, which would take long."""
        torch._dynamo.reset()
        assert torch.compile(torch.mm)(torch.eye(size), torch.eye(size)).sum() == size

    compiles(2 + rank)
    cache.keep()
    dist.barrier()
    assert len(graphs(cache.file)) == 2, "one host's replaced the other's"
    dist.barrier()
    if rank == 1:
        compiles(4)
    cache.keep()
    dist.barrier()
    assert len(graphs(cache.file)) == 3, "only what rank 0 compiles is kept"
    with zipfile.ZipFile(cache.file) as kept:
        assert "other.main.so" not in {Path(name).name for name in kept.namelist()}
    dist.destroy_process_group()


def test_hosts_replace_each_others_kinds_or_keep_what_another_program_compiled(
    tmp_path: Path,
) -> None:
    mp.spawn(on_each_host, (str(tmp_path),), nprocs=2)


def test_code_of_another_instruction_set_is_taken_for_ones_own(
    tmp_path: Path, ranks: Ranks
) -> None:
    program = (
        "from pathlib import Path\n"
        "import torch\n"
        "from sgt_ds.training import Ranks\n"
        "from sgt_ds.training.compiling import CompileCache\n"
        "ranks = Ranks(0, 0, 1, torch.device('cpu'), None)\n"
        "print(CompileCache(Path(), ranks).file)\n"
    )
    own = CompileCache(tmp_path, ranks).file.name
    assert f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}" in own
    plain = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert f"{platform.machine()}-DEFAULT" in plain
