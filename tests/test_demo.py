"""The demo's own parts: what it reuses, what it ends, what it samples, the run that it ships."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zstandard

from sgt_ds.config import accumulation_steps, load_run_config
from sgt_ds.demo.console import Console
from sgt_ds.demo.ledger import Ledger, key_of
from sgt_ds.demo.processes import CommandFailed, Running, run
from sgt_ds.demo.sample import openings, write_sample
from sgt_ds.demo.settings import RANKS
from sgt_ds.errors import UserError
from sgt_ds.growth import build_policy

ROOT = Path(__file__).resolve().parents[1]
RUN_YAML = ROOT / "sgt_ds" / "demo" / "demo.yaml"
# Starts a child that ignores SIGTERM and holds the pipes, then ends or waits as told.
PARENT = """
import subprocess, sys, time
child = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
print(subprocess.Popen([sys.executable, "-c", child]).pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("parent_seconds", ["0.5", "60"])
def test_a_grandchild_survives_the_command(
    tmp_path: Path, parent_seconds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgt_ds.demo.processes.END_GRACE_SECONDS", 1.0)
    lines: list[str] = []
    with Running([sys.executable, "-c", PARENT, parent_seconds], {}, tmp_path / "log") as command:
        until = time.monotonic() + 30
        while len(lines) < 2 and time.monotonic() < until:
            if line := command.next_line(0.2):
                lines.append(line)
        grandchild = next(int(line) for line in lines if line.isdigit())
        assert is_running(grandchild)
        if parent_seconds == "0.5":  # the pipes stay open, and the demo must not wait for them
            while command.next_line(0.2) is not None:
                assert time.monotonic() < until
    assert not is_running(grandchild)


def test_a_failed_command_loses_its_line_or_its_status(tmp_path: Path) -> None:
    script = (
        "import sys; print('noise'); print('RUN.yaml: steps: no', file=sys.stderr); sys.exit(2)"
    )
    with pytest.raises(CommandFailed, match=r"^RUN.yaml: steps: no$") as failure:
        run(Console(), [sys.executable, "-c", script], tmp_path / "log")
    assert failure.value.exit_code == 2


def test_a_changed_file_or_input_is_reused(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.write_text("one")
    key = key_of("step", 1)
    Ledger(tmp_path).finish("step", key, [made], note="kept")
    ledger = Ledger(tmp_path)
    assert ledger.holds("step", key)
    assert ledger.fact("step", "note") == "kept"
    assert not ledger.holds("step", key_of("step", 2))
    assert not ledger.holds("other", key)
    made.write_text("two")
    assert not ledger.holds("step", key)
    ledger.begin("step", key)
    assert not Ledger(tmp_path).holds("step", key), "begun is not done"


def test_a_sample_reads_past_its_size_or_hides_a_bad_row(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"Document {number}. " * 10}) + "\n" for number in range(100)]
    (tmp_path / "a.json.gz").write_bytes(gzip.compress("".join(rows[:50]).encode()))
    (tmp_path / "b.json.zst").write_bytes(
        zstandard.ZstdCompressor().compress("".join(rows[50:]).encode())
    )
    (tmp_path / "c.json").write_text("{not json\n")
    pattern = str(tmp_path / "*.json*")
    train, validation = write_sample(tmp_path / "out", pattern, 9_000, Console())
    texts = [
        json.loads(line)["text"]
        for path in (train, validation)
        for line in gzip.decompress(path.read_bytes()).decode().splitlines()
    ]
    assert 9_000 <= sum(map(len, texts)) < 9_200
    assert len(set(texts)) == len(texts)
    assert any(text.startswith("Document 50.") for text in texts), "the second file was not read"
    assert openings(tmp_path / "out", 1, 2) == ["Document 0."]
    with pytest.raises(UserError, match=r"c\.json: line 1: is not a row of a C4 shard"):
        write_sample(tmp_path / "out", pattern, 10**9, Console())
    with pytest.raises(UserError, match="no such file"):
        write_sample(tmp_path / "out", str(tmp_path / "nothing*"), 1, Console())


def test_the_shipped_run_misses_a_phase() -> None:
    config = load_run_config(RUN_YAML)
    growth, steps = config.growth, config.training.steps
    assert growth.freeze_at is not None
    assert 0 < growth.t_start < growth.freeze_at < steps
    assert growth.t_start + 5 * growth.interval < growth.freeze_at, "three layers, twice each"
    policy = build_policy(config.method, growth, config.model)
    # Θ that never changed: the entropies let nothing grow, and the run ends fixed all the same.
    state = policy.initial_state()
    phases = [policy.phase(step, state) for step in range(steps + 1)]
    assert phases == sorted(phases, key=["warmup", "growing", "fixed"].index)
    assert set(phases) == {"warmup", "growing", "fixed"}
    assert accumulation_steps(config, RANKS, RUN_YAML) == 1


def test_bad_data_shows_a_traceback(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "sgt_ds.demo", "--data", "nothing*.gz", "--work-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert answer.returncode == 2
    assert answer.stderr == "nothing*.gz: no such file; check the path or the pattern\n"


def test_an_interrupted_demo_leaves_a_half_written_corpus(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "sgt_ds.demo", "--work-dir", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as demo:
        assert demo.stdout is not None
        while "[1/6]" not in demo.stdout.readline():
            pass
        time.sleep(0.5)
        os.kill(demo.pid, signal.SIGTERM)
        _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "continues from here" in errors
    assert not list(tmp_path.rglob("*.tmp"))
    assert not (tmp_path / "steps.json").exists()
