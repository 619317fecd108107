"""Kinds of block compiled beside training: by a real run, for one that grows; and its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import runs
import torch

from sgt_ds.config import PRESETS, GrowthConfig, TrainingConfig, load_run_config
from sgt_ds.errors import UserError
from sgt_ds.flops import passes_to_come
from sgt_ds.growth import Passes
from sgt_ds.training import compile_ahead
from sgt_ds.training.compile_ahead import CompileAhead
from sgt_ds.training.compile_kinds import Kind, Work, kinds_of

GROWTH = {"k_max": 2, "entry": "decay"}
LATE = {**GROWTH, "t_start": 500_000, "interval": 1000}
WORK = Work(
    PRESETS["tiny"],
    device="cpu",
    dtype="float32",
    micro_batch_size=1,
    sequence_length=8,
    document_mask=False,
    activation_checkpointing=False,
    fp8=False,
    memory_bytes=2**30,
    kinds=(Kind(None, True), Kind(Passes(1, "attention", (0, 2), None), True)),
)


def wait_until(true: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def graphs(files: set[Path]) -> set[str]:
    """Keys of the compiled graphs among a cache's files, by their names in it."""
    return {name.parts[2] for name in files if name.match("fxgraph/*/*/*")}


def processes_beside(pid: int) -> list[int]:
    """Children of a rank that compile for it."""
    found = []
    with suppress(OSError):  # one has just ended
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if "compile_kinds" in Path(f"/proc/{child}/cmdline").read_text():
                found.append(int(child))
    return found


def test_growth_compiles_what_a_process_beside_training_has_or_the_kept_file_lacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = runs.write_data(tmp_path / "data")
    shared = {"compile": True, "compile_cache": str(tmp_path / "kept")}
    run = runs.write_run(
        tmp_path / "late.yaml",
        data,
        growth=LATE,
        training={**shared, "compile_ahead": True, "steps": 600_000, "validate_every": 600_000},
        checkpoint={"every": 600_000},
    )
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "one"))
    log = tmp_path / "late" / "logs" / "rank-00000.log"
    with subprocess.Popen(
        runs.single(run), env=runs.environment(), start_new_session=True, stdout=subprocess.DEVNULL
    ) as rank:
        try:
            wait_until(lambda: processes_beside(rank.pid), 250)
            rank.send_signal(signal.SIGSTOP)  # its updates would only take the cores
            wait_until(lambda: not processes_beside(rank.pid), 400)
            rank.send_signal(signal.SIGCONT)
            wait_until(lambda: " ahead " in log.read_text(), 60)
            rank.terminate()
            rank.wait(60)
        finally:
            runs.end(rank)
    # All heads with factors; one and two passes of two.
    assert " 3 kinds of block compiled ahead in " in log.read_text()
    with zipfile.ZipFile(next((tmp_path / "kept").glob("*.zip"))) as kept:
        held = graphs({Path(name) for name in kept.namelist()})

    # On another machine: all that a run compiles which grows at once is there.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
    growing = {**GROWTH, "t_start": 3, "interval": 2}
    run = runs.write_run(tmp_path / "run.yaml", data, growth=growing, training=shared)
    runs.run_to_end(runs.single(run), timeout=500)
    decided = {line["rule"] for line in runs.journal_lines(tmp_path / "run") if "rule" in line}
    assert decided >= {"activate", "deepen"}
    folder = next((tmp_path / "other").glob("sgt-ds-*"))
    assert graphs({path.relative_to(folder) for path in folder.rglob("*")}) <= held


def test_a_cpu_compiles_ahead_unasked() -> None:
    def compiles(**keys: bool | None) -> tuple[bool, bool]:
        training = TrainingConfig(**keys)
        return training.compiles_ahead(on_gpu=False), training.compiles_ahead(on_gpu=True)

    assert compiles() == (False, True)
    assert compiles(compile_ahead=True) == (True, True)
    assert compiles(compile_ahead=False) == compiles(compile=False) == (False, False)


RANK = """
import os, sys, time
from dataclasses import replace
from sgt_ds.training.compile_ahead import CompileAhead
from sgt_ds.training.compile_kinds import Work
work = replace(Work.from_json(sys.argv[1]), rank_pid=os.getpid())
ahead = CompileAhead(work, 0)
for _ in range(2):
    ahead.proceed({}, measured=True, grows=True)
print(ahead._process.pid, flush=True)
time.sleep(600)
"""


ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
RUN_KINDS = """
import sys
from torch._dynamo.utils import counters
from sgt_ds.training.compile_kinds import Work, compile_kinds
list(compile_kinds(Work.from_json(sys.stdin.read())))
print([counters["inductor"][name] for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")])
"""


# On a CPU a whole run shows it, above.
@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=ON_A_GPU)])
def test_a_kind_compiled_ahead_is_compiled_again(device: str, tmp_path: Path) -> None:
    work = replace(WORK, device=device, sequence_length=64, rank_pid=os.getpid())
    folders = {name: str(tmp_path) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    told = []
    for words in (("-m", "sgt_ds.training.compile_kinds"), ("-c", RUN_KINDS)):
        done = subprocess.run(
            [sys.executable, *words],
            input=work.as_json(),
            env={**runs.environment(), **folders},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "unable to load" not in done.stderr
        told.append(done.stdout.split("\n")[:-1])
    # Forward and backward of each.
    assert told == [["compiled"] * 2, ["[4, 0]"]]


def test_a_killed_rank_leaves_the_process_that_compiles_for_it(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RANK, WORK.as_json()],
        env={**runs.environment(), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as rank:
        assert rank.stdout is not None
        try:
            beside = int(rank.stdout.readline())
            assert os.getpgid(beside) == rank.pid
            # Once it compiles: what it has not imported yet it can't ask of the kernel.
            wait_until(lambda: list(tmp_path.iterdir()), 200)
            rank.send_signal(signal.SIGKILL)
            wait_until(lambda: not Path(f"/proc/{beside}").exists(), 5)
        finally:
            runs.end(rank)


def test_what_cannot_be_compiled_ahead_fails_the_run_or_is_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    ahead = CompileAhead(replace(WORK, dtype="float99"), 0)
    ahead.proceed({}, measured=True, grows=True)

    def told() -> bool:
        ahead.proceed({}, measured=True, grows=True)
        return bool(caplog.records)

    wait_until(told, 200)
    (record,) = caplog.records
    assert "failed: AttributeError" in record.getMessage()
    assert ahead.compiled == 0
    ahead.close()


def test_training_waits_for_a_kind_that_the_process_is_still_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch's compiler holds locks that the rank would wait for."""
    caplog.set_level("INFO")
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(compile_ahead.sys, "executable", str(hanging))
    ahead = CompileAhead(WORK, 0)
    unmeasured, loops = (
        {"measured": False, "grows": True},
        {0: Passes(1, "attention", (0, 2), None)},
    )
    ahead.proceed({}, **unmeasured)
    ahead.proceed({}, **unmeasured)
    assert ahead._process is None, "the rank compiles a kind without loops itself"
    for _ in range(2):
        ahead.proceed({}, measured=True, grows=True)
    process = ahead._process
    assert process is not None
    for measured in (False, True):
        ahead.proceed({}, measured=measured, grows=True)
    assert process.poll() is None
    ahead.proceed(loops, measured=True, grows=True)
    assert process.returncode == -signal.SIGKILL
    (record,) = caplog.records
    assert "after 0 kinds and 0 s (training needs the next kind now)" in record.getMessage()
    ahead.proceed(loops, measured=True, grows=True)
    ahead.close()
    assert len(caplog.records) == 1


def test_a_run_ends_before_the_compilers_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor would take them for ranks that outlive their launcher."""
    compiler = tmp_path / "compiler.pid"
    compiling = tmp_path / "compiling"
    compiling.write_text(f"#!/bin/sh\nsleep 2 &\necho $! > {compiler}\nwait\n")
    compiling.chmod(0o755)
    monkeypatch.setattr(compile_ahead.sys, "executable", str(compiling))
    ahead = CompileAhead(WORK, 0)
    for _ in range(2):
        ahead.proceed({}, measured=True, grows=True)
    wait_until(lambda: compiler.exists() and compiler.read_text().strip(), 20)
    pid = int(compiler.read_text())
    assert Path(f"/proc/{pid}").exists()
    ahead.close()
    assert not Path(f"/proc/{pid}").exists()


VALIDATE = """
import sys
from sgt_ds import train
from sgt_ds.model import Transformer
from sgt_ds.training.compile_ahead import CompileAhead
from sgt_ds.training.compile_kinds import kinds_of

told, ran = set(), []
proceed, forward = CompileAhead.proceed, Transformer.forward

def noted(self, passes, *, measured, grows):
    told.update(kind.graph for kind in kinds_of([passes], [measured]))
    proceed(self, passes, measured=measured, grows=False)

def checked(self, *tensors, loops=None, measure=False, **options):
    for run in (loops or {}).values():
        heads = None if run.heads is None else len(run.heads)
        graph = (run.depth, run.scope, heads, run.scale is not None), measure
        ran.append((graph, graph in told))
    self.compile_blocks = False  # when which kind comes is the same
    return forward(self, *tensors, loops=loops, measure=measure, **options)

CompileAhead.proceed, Transformer.forward = noted, checked
status = train.main([sys.argv[1]])
print(len({graph for graph, _ in ran}), {graph for graph, known in ran if not known})
sys.exit(status)
"""


def test_a_validation_runs_a_kind_before_the_process_beside_it_is_told(tmp_path: Path) -> None:
    run = runs.write_run(
        tmp_path / "run.yaml",
        runs.write_data(tmp_path / "data"),
        growth={**GROWTH, "t_start": 4, "interval": 4},
        training={"compile": True, "compile_ahead": True, "steps": 14, "validate_every": 4},
    )
    done = subprocess.run(
        [sys.executable, "-c", VALIDATE, str(run)],
        env=runs.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "3 set()"


def test_a_process_is_started_where_nothing_will_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompileAhead, "_start", lambda self, work: pytest.fail("started"))
    ahead = CompileAhead(WORK, 0)
    for _ in range(3):
        ahead.proceed({}, measured=True, grows=False)


@pytest.mark.parametrize("free", [2**31 + 100, 2**31 + 99])
def test_a_process_beside_a_rank_takes_memory_that_the_run_needs(
    free: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2**40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1000)
    started: list[Work] = []
    monkeypatch.setattr(CompileAhead, "_start", lambda self, work: started.append(work))
    # 1.1 times what is planned, less what it has.
    ahead = CompileAhead(replace(WORK, device="cuda:0"), 1000)
    assert compile_ahead._CONTEXT_BYTES == 2**30
    for _ in range(3):
        ahead.proceed({}, measured=True, grows=True)
    if free == 2**31 + 100:
        assert [len(work.kinds) for work in started] == [1], (
            "what the first update compiled as well"
        )
        assert not caplog.records
    else:
        assert not started
        assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("method", "entry"), [("sgt", "decay"), ("sgt", "ramp"), ("vanilla", "none")]
)
def test_a_kind_that_a_run_needs_is_not_among_those_to_come(method: str, entry: str) -> None:
    growth = GrowthConfig.model_validate(
        {"k_max": 3, "layers": 2, "heads": 2, "t_start": 4, "interval": 2, "entry": entry}
    )
    coming = passes_to_come(method, growth, PRESETS["tiny"], 40)
    graphs = {kind.graph for kind in kinds_of(coming, (True,))}
    few = {(depth, "attention", 2, entry == "ramp") for depth in (1, 2, 3)}
    wanted = {"vanilla": {None}, "sgt": {None, *few}}[method]
    if entry == "decay":
        wanted.add((1, "attention", None, True))
    assert graphs == {(kind, True) for kind in wanted}


def test_compiling_ahead_without_compiling_is_accepted(tmp_path: Path) -> None:
    run = runs.write_run(tmp_path / "run.yaml", tmp_path)
    with pytest.raises(UserError, match="training: compile_ahead: is true, and compile is false"):
        load_run_config(run, ["training.compile_ahead=true"])
