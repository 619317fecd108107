"""`sgt-ds growth rollback`: a run goes on from where it was told to, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs

from sgt_ds.checkpoints import list_checkpoints, newest_good, verify
from sgt_ds.cli import main
from sgt_ds.config import RunLayout
from sgt_ds.files import truncate
from sgt_ds.report import read_history
from sgt_ds.telemetry import read_outcome
from sgt_ds.training import rollback
from sgt_ds.training.run_directory import only_trainer

pytestmark = pytest.mark.launcher


def steps(folder: Path) -> list[int]:
    return sorted(info.step for info in list_checkpoints(folder / "checkpoints"))


def interrupted(path: Path, size: int) -> None:
    """Between the two files that are cut."""
    if path.name == "growth.jsonl":
        raise KeyboardInterrupt
    truncate(path, size)


def roll_back(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> tuple[int, str]:
    status = main(["growth", "rollback", str(run), *arguments])
    said = capsys.readouterr()
    if status:
        assert not said.out
        assert said.err.count("\n") == 1
    return status, said.out + said.err


def test_a_rollback_that_loses_something_or_is_forgotten_by_the_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = runs.write_data(tmp_path / "data")
    file = runs.write_run(tmp_path / "run.yaml", data, checkpoint={"every": 6, "keep_last": 9})
    run, layout = tmp_path / "run", RunLayout(tmp_path / "run")
    runs.run_to_end(runs.single(file))
    losses, journal = runs.losses(run), layout.journal.read_bytes()
    metrics, decisions = layout.metrics.read_bytes(), runs.check_replay(run)
    assert steps(run) == [6, 12, 18, 20]

    status, said = roll_back(capsys, run, "--to", "5")
    assert status == 2
    assert "--to 5: no good checkpoint at or before that step; the oldest is at step 6" in said
    assert steps(run) == [6, 12, 18, 20]
    assert not layout.set_aside.exists()

    status, said = roll_back(capsys, run, "--to", "13", "--freeze")
    assert status == 0
    assert f"{run} resumes from step 12" in said
    aside = layout.set_aside / "001"
    assert (steps(run), steps(aside)) == ([6, 12], [18, 20])
    assert not [
        fault for info in list_checkpoints(aside / "checkpoints") for fault in verify(info.path)
    ]
    assert (aside / "growth.jsonl").read_bytes() == journal
    assert (aside / "metrics.jsonl").read_bytes() == metrics
    # What shows a run shows where it goes on, and its past beside it.
    assert journal.startswith(layout.journal.read_bytes())
    assert metrics.startswith(layout.metrics.read_bytes())
    assert (runs.last_step(run), read_history(run).last_step) == (12, 12)
    assert [line.decision.step for line in read_history(run).decisions][-1] <= 12
    outcome = read_outcome(layout.control)
    assert outcome is not None
    assert outcome.reason == "rolled back to step 12"
    none_left = "nothing to set aside"
    assert (
        f"{none_left}: the run has not reached step 13" in roll_back(capsys, run, "--to", "13")[1]
    )
    assert f"{none_left}\n" in roll_back(capsys, run, "--to", "12")[1]
    assert [folder.name for folder in layout.set_aside.iterdir()] == ["001"]

    slowed = json.dumps({"slow_updates": {"seconds": 0.3}})
    process = subprocess.Popen(
        [sys.executable, runs.ROOT / "tests" / "faulty.py", slowed, file],
        env=runs.environment(),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    try:
        # The old rows go when it resumes; it is held in the middle.
        while not 12 < runs.last_step(run) < 20:
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGSTOP)
        status, said = roll_back(capsys, run, "--to", "6")
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(timeout=120) == 0
    finally:
        runs.end(process)
    assert status == 2
    assert "is being trained by another process" in said
    start = read_history(run).starts[-1]
    assert (start.step, start.reached) == (12, 20), "what is done again"
    frozen = [x for x in runs.journal_lines(run) if x["type"] == "decision" and x["step"] >= 12]
    # The window at 12 was decided before the checkpoint; those at 14 and later are not.
    assert [(x["step"], x["rule"]) for x in frozen] == [(12, "activate"), (12, "freeze")]
    again = runs.losses(run)
    assert sorted(again) == list(range(1, 21))
    # A loop of depth 1 enters in both; from 15 on depth 2 is missing.
    assert next(step for step in losses if again[step] != losses[step]) == 15
    runs.check_replay(run)

    # Back once more, before growth was frozen: the run that it was at first, to the last bit. That
    # rollback was killed when it had cut one file of two.
    with monkeypatch.context() as killed:
        killed.setattr(rollback, "truncate", interrupted)
        assert roll_back(capsys, run, "--to", "12")[0] == 130
    assert "the later freeze is undone" in roll_back(capsys, run, "--to", "12")[1]
    assert not layout.freeze_request.exists()
    assert sorted(folder.name for folder in layout.set_aside.iterdir()) == ["001", "002"]
    assert runs.last_step(run) == 12
    assert steps(layout.set_aside / "002") == [18, 20]
    runs.run_to_end(runs.single(file))
    outcome = read_outcome(layout.control)
    assert outcome is not None
    assert (outcome.status, outcome.reason) == (0, "complete at step 20")
    assert runs.losses(run) == losses
    assert layout.journal.read_bytes() == journal
    assert runs.check_replay(run) == decisions
    newest = newest_good(run / "checkpoints")
    assert newest is not None
    assert newest.step == 20

    layout.journal.rename(tmp_path / "lost.jsonl")
    told = runs.run_to_end(runs.single(file))
    assert f"{layout.journal} is missing; a new journal starts at step 20 " in told
    capsys.readouterr()
    assert main(["growth", "what-if", str(run), "--k-max", "1"]) == 2
    assert "step 20: lines before it are missing" in capsys.readouterr().err
    assert main(["report", str(run), "-o", str(tmp_path / "report.html")]) == 0
    # An old copy put in its place: the run's own loops, and what is missing, are told all the same.
    lines = (tmp_path / "lost.jsonl").read_text().splitlines(keepends=True)
    layout.journal.write_text("".join(lines[:9]))
    told = runs.run_to_end(runs.single(file))
    assert f"{layout.journal} lacks lines; it goes on at step 20 " in told
    capsys.readouterr()
    assert main(["growth", "show", str(run), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["loops"] == next(x["loops"] for x in map(json.loads, lines[::-1]) if "loops" in x)
    assert shown["first_gap"] == 20
    assert "lacks lines" not in runs.run_to_end(runs.single(file))
    assert main(["plan", "--journal", str(run)]) == 2
    assert main(["report", str(run), "-o", str(tmp_path / "report.html")]) == 0
    assert "planned, with this run" not in (tmp_path / "report.html").read_text()
    layout.journal.unlink()  # such a one does not replay


def test_a_rollback_of_something_else_or_of_a_run_that_lives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = roll_back(capsys, tmp_path, "--to", "5")
    assert (status, list(tmp_path.iterdir())) == (2, [])
    assert f"{tmp_path}: is not a run directory" in said
    data = runs.write_data(tmp_path / "data")
    file = runs.write_run(tmp_path / "run.yaml", data)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.yaml").write_text(file.read_text())
    assert "no such folder of checkpoints" in roll_back(capsys, tmp_path / "run", "--to", "5")[1]
    with only_trainer(tmp_path / "run"):
        assert "is being trained" in roll_back(capsys, tmp_path / "run", "--to", "5")[1]


def test_two_rollbacks_in_a_row_forget_how_far_the_run_had_come(tmp_path: Path) -> None:
    """Each set aside what it found; a folder of somebody else's is neither."""
    layout = RunLayout(tmp_path)
    for folder, rows in (("001", "abc"), ("002", "ab"), ("zz notes", ""), (".", "a")):
        place = tmp_path if folder == "." else layout.set_aside / folder
        place.mkdir(parents=True, exist_ok=True)
        RunLayout(place).metrics.write_text("".join(f"{row}\n" for row in rows))
    assert rollback.uncut_metrics(layout) == RunLayout(layout.set_aside / "001").metrics
    layout.metrics.write_text("a\nx\n")  # trained on, otherwise
    assert rollback.uncut_metrics(layout) == layout.metrics
