"""`sgt-ds top` on the files and on the exporter of a run."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from made_checkpoints import write_checkpoint

from sgt_ds.cli import main
from sgt_ds.config import PRESETS, TelemetryConfig
from sgt_ds.errors import UserError
from sgt_ds.growth import Decision, Journal, Loop, Measurement, State
from sgt_ds.model import Transformer
from sgt_ds.ports import free_ports
from sgt_ds.report import open_source
from sgt_ds.report.access import Access
from sgt_ds.report.terminal import binned, sparkline
from sgt_ds.telemetry import Exporter, StepRecord, targets, write_outcome

MODEL = PRESETS["tiny"]
LOOPING = State(
    {4: Loop(depth=2, heads=(1, 3), scope="attention", step=40, entered=60)}, growing_layer=4
)


def record(step: int, loss: float) -> StepRecord:
    return StepRecord(
        step=step,
        tokens=step * 512,
        loss=loss,
        learning_rate=3e-4,
        grad_norm=0.75,
        step_seconds=0.5,
        tokens_per_second=1024.0,
        flops=step * 103,
        vanilla_flops=step * 100,
        overhead_ratio=0.03,
        flops_per_token=103,
        mfu_ratio=None,
        data_wait_seconds=0.0,
        skipped_steps=0,
        phase="growing",
        loops=LOOPING,
        entropy=[[0.2 * layer] * 4 for layer in range(6)],
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that has come to step 100 of 300, written by the parts that write real ones."""
    folder = tmp_path / "little-run"
    folder.mkdir()
    header = {
        "method": "sgt",
        "growth": {"k_max": 2},
        "model": MODEL.model_dump(),
        "steps": 300,
    }
    journal = Journal.create(folder / "growth.jsonl", header)
    for step in range(1, 101):
        # Layer l falls from 1 to l/10, so that the deepest stays highest.
        rows = tuple((1 - (1 - layer / 10) * step / 100,) * 4 for layer in range(6))
        journal.measure(Measurement(step, rows, tuple((math.nan,) * 4 for _ in rows), 8))
        if step == 60:
            decision = Decision(step, "deepen", "it rose", (4,), None, State(), LOOPING, "growing")
            journal.decision(decision, flops=1)
    journal.flush()
    with (folder / "metrics.jsonl").open("w") as stream:
        for step in range(10, 101, 10):
            stream.write(json.dumps(record(step, 6 - step / 50).as_metrics_row()) + "\n")
        stream.write(json.dumps({"step": 100, "validation_loss": 4.125}) + "\n")
        stream.write('{"step": 110, "tok')  # the trainer is just writing this
    return folder


def test_top_shows_a_run_directory_at_80_columns(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", str(run_dir), "--once"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("little-run  sgt  growing  (newest row ")
    # 200 updates of 512 tokens at 1,024 tokens a second.
    assert lines[1] == "step 100/300  ETA 1m40s"
    assert "validation loss 4.1250  learning rate 3.00e-04  gradient norm 0.75" in out
    assert "FLOPs overhead +3.00%" in out
    assert "loss 4.0000  (5.800 to 4.000)" in out
    rows = {int(row.split()[0]): row for row in lines if re.match(r" +\d+ ", row)}
    assert list(rows) == [5, 4, 3, 2, 1, 0]
    assert rows[4].endswith("  0.400  loops ×2: heads 1,3")
    assert rows[0].startswith("  0 █")  # began at 1
    assert rows[0].rstrip().endswith("  0.000")
    assert rows[5].endswith("  0.500")


def test_top_shows_an_exporter(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_ports()
    common: dict[str, Any] = {"info": {"run": "r", "method": "sgt"}, "model": MODEL}
    config = TelemetryConfig(port=port - 1)
    exporter = Exporter(
        config, run_wide=True, local_rank=1, rank=0, run_steps=300, loads=True, **common
    )
    exporter.start()
    try:
        assert main(["top", f"127.0.0.1:{port}", "--once"]) == 0
        assert "no entropy measured yet" in capsys.readouterr().out
        exporter.publish(record(100, 4.0))
        time.sleep(0.25)
        assert main(["top", f"http://127.0.0.1:{port}/metrics", "--once"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("r  sgt  growing  (running)\nstep 100/300  ETA 1m40s\n")
        assert "loss 4.0000" in out
        assert re.search(r"(?m)^  4 .*  0\.800  loops ×2: heads 1,3$", out)
        assert "entropy by layer × heads   0.000 ' ░▒▓█' 1.000" in out
    finally:
        exporter.close()

    second = Exporter(config, run_wide=False, local_rank=1, rank=1, **common)
    second.start()
    try:
        assert main(["top", f"127.0.0.1:{port}", "--once"]) == 2
        assert "not the run's rank 0" in capsys.readouterr().err
    finally:
        second.close()


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        ("no-such-run", "is not a run directory"),
        ("127.0.0.1:1", "does not answer as an exporter"),
        ("localhost:99999", "localhost:99999: its port is not one of 1 to 65535; give telemetry.p"),
        ("https://localhost:123456/metrics", "its port is not one of 1 to 65535"),
        (".", "holds neither metrics.jsonl nor growth.jsonl"),
        ("refused", "has recorded nothing yet"),
    ],
)
def test_a_wrong_target_is_one_line_and_status_2(
    target: str,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "refused" / "control" / "ranks").mkdir(parents=True)
    assert main(["top", target, "--once"]) == 2
    err = capsys.readouterr().err
    assert remedy in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [("top", "--once"), ("report", "-o", "report.html")])
def test_a_journal_that_is_still_empty_hides_the_run(
    arguments: tuple[str, ...],
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(run_dir.parent)
    verb, *flags = arguments
    (run_dir / "growth.jsonl").write_text("")
    assert main([verb, str(run_dir), *flags]) == 0
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "control" / "ranks").mkdir(parents=True)
    assert main([verb, str(run_dir), *flags]) == 2
    assert "has recorded nothing yet" in capsys.readouterr().err


def test_rows_that_a_resume_cut_off_are_not_shown_any_more(run_dir: Path) -> None:
    source = open_source(str(run_dir))
    assert len(source.read().losses) == 10
    metrics = run_dir / "metrics.jsonl"
    kept = metrics.read_text().splitlines(keepends=True)[:5]
    metrics.write_text("".join(kept))
    assert len(source.read().losses) == 5
    # Grown past its old length again between two looks, and back once more.
    rows = [json.dumps(record(step, 1.0).as_metrics_row()) + "\n" for step in (60, 70, 20)]
    with metrics.open("a") as stream:
        stream.writelines(rows)
    view = source.read()
    assert (view.step, list(view.losses)[-1]) == (20, 1.0)
    assert len(view.losses) == 3  # steps 10, 20 and 20 anew


def test_a_damaged_row_is_not_found_by_its_line(run_dir: Path) -> None:
    source = open_source(str(run_dir))
    assert len(source.read().losses) == 10  # and eleven lines
    with (run_dir / "metrics.jsonl").open("a") as stream:
        stream.write("\n{}\n[]\n")
    with pytest.raises(UserError, match="line 12: is not a JSON object; correct or remove"):
        source.read()
    with pytest.raises(UserError, match="line 12: is not a JSON object"):
        open_source(str(run_dir)).read()


def test_a_run_that_was_rolled_back_is_shown_where_it_was(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = {"method": "sgt", "growth": {"k_max": 2}, "model": MODEL.model_dump(), "steps": 100}
    journal = run_dir / "growth.jsonl"
    _, *rest = journal.read_text().splitlines(keepends=True)
    journal.unlink()
    Journal.create(journal, header).flush()
    with journal.open("a") as stream:
        stream.writelines(rest)
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text(metrics.read_text().rpartition("\n")[0] + "\n")
    (run_dir / "run.yaml").touch()
    for step in (50, 100):
        write_checkpoint(run_dir, Transformer(MODEL), step=step)
    assert main(["top", str(run_dir), "--once"]) == 0
    assert "\nstep 100/100  done\n" in capsys.readouterr().out
    (run_dir / "control").mkdir()
    write_outcome(run_dir / "control", 0, "complete at step 100")
    assert main(["top", str(run_dir), "--once"]) == 0
    assert "\ncomplete at step 100\nstep 100/100  done\n" in capsys.readouterr().out
    assert main(["growth", "rollback", str(run_dir), "--to", "60"]) == 0
    capsys.readouterr()
    assert main(["top", str(run_dir), "--once"]) == 0
    out = capsys.readouterr().out
    assert "\nrolled back to step 50\nstep 50/100\n" in out
    assert "validation loss" not in out
    assert "loops" not in out, "what was decided at step 60"
    with metrics.open("a") as stream:  # resumed
        stream.write(json.dumps(record(51, 1.0).as_metrics_row()) + "\n")
    assert open_source(str(run_dir)).read().step == 51


def test_the_live_view_redraws_on_a_terminal_and_ends_on_interrupt(run_dir: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "sgt_ds", "top", str(run_dir), "--every", "0.2"]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "COLUMNS": "80"}
    process = subprocess.Popen(
        command,
        stdout=slave,
        stderr=slave,
        stdin=slave,
        env=environment,
        # A shell that starts the tests in its background has them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(slave)
    seen = b""
    deadline = time.monotonic() + 60
    while seen.count(b"\x1b[H") < 3 and time.monotonic() < deadline:
        if select.select([master], [], [], 1)[0]:
            seen += os.read(master, 65536)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    os.close(master)
    assert seen.count(b"\x1b[H") >= 3
    assert "loops ×2".encode() in seen


def test_the_ranks_line_misses_one_that_is_silent_or_late(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common: dict[str, Any] = {"info": {"run": "r", "method": "sgt"}, "model": MODEL}
    config = TelemetryConfig(port=free_ports(2))
    exporters = [
        Exporter(config, run_wide=rank == 0, local_rank=rank, rank=rank, run_steps=300, **common)
        for rank in range(2)
    ]
    groups = targets([("127.0.0.1", 3)], run="r", port=config.port)  # nobody is rank 2
    for rank, exporter in enumerate(exporters):
        exporter.start()
        exporter.observe_step(100 - rank, 2.0, 0.0)  # rank 0 waits for rank 1
        exporter.publish_rank(
            part_seconds={"forward": 1.0 + rank, "reduce": 1.0 - rank},
            collective_seconds=0.0,
            device_memory=None,
        )
        exporter.publish(record(100 - rank, 4.0))
    try:
        exporters[0].serve_targets(groups)
        (run_dir / "targets.json").write_text(json.dumps(groups))
        time.sleep(0.25)  # a scrape is answered from the newest rendering for a fifth of a second
        for target in (f"127.0.0.1:{config.port}", str(run_dir)):
            assert main(["top", target, "--once"]) == 0
            out = capsys.readouterr().out
            line = "ranks 3  2 answer, not 2  step 99 to 100  slowest 1 (+33.3%)"
            assert line in out.splitlines(), out
            assert max(map(len, out.splitlines())) <= 80
    finally:
        for exporter in exporters:
            exporter.close()
    assert main(["top", str(run_dir), "--once"]) == 0
    assert "\nranks 3  0 answer\n" in capsys.readouterr().out
    (run_dir / "targets.json").write_text('[{"targets": ["127')  # just being written
    assert main(["top", str(run_dir), "--once"]) == 0
    assert "ranks" not in capsys.readouterr().out


def test_a_sparkline_spans_its_range_and_marks_what_is_not_finite() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 80) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, math.nan, 8], 80) == "▁·█"
    assert sparkline([3, 3], 80) == "▅▅"
    assert binned(list(range(100)), 4) == [12, 37, 62, 87]
    assert sparkline([], 80) == ""


def test_a_password_goes_where_an_exporter_points_to_or_into_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str | None] = []

    class Redirects(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Authorization"])
            self.send_response(302 if self.path == "/metrics" else 200)
            self.send_header("Location", f"http://127.0.0.1:{server.server_port}/elsewhere")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody is there
    access = Access(username="operator", password="secret")
    with HTTPServer(("127.0.0.1", 0), Redirects) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        access.fetch(f"http://127.0.0.1:{server.server_port}/metrics", 10)
        server.shutdown()
    assert asked[0] is not None
    assert asked[1:] == [None]
    assert "secret" not in repr(access)
