"""Paths that the operating system refuses, and text that stdout can't hold: a line, no traceback."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import runs

from sgt_ds import train
from sgt_ds.cli import main
from sgt_ds.errors import SgtError, UserError, refused_by_system

LONG = "x" * 300
# A verb, how it is told to use a path, and the field that names it.
USES = [
    ("config {}/run.yaml", ""),
    ("plan {}/run.yaml", ""),
    ("plan run.yaml --journal {}/growth.jsonl", "--journal: "),
    ("plan run.yaml deepspeed={}/zero.json", "deepspeed: "),
    ("train {}/run.yaml", ""),
    ("train run.yaml run_dir={}/run", "run_dir: "),
    ("train run.yaml init={}/start", "init: "),
    ("train run.yaml resume={}/run/checkpoints/step-00000002", "resume: "),
    ("train run.yaml --hostfile {}/hosts", "--hostfile: "),
    ("hostfile check {}/hosts", ""),
    ("monitor targets hosts --run {}/run", "--run: "),
    ("top {}/run --once", ""),
    ("stop {}/run", ""),
    ("report {}/run -o r.html", ""),
    ("growth show {}/run", ""),
    ("growth freeze {}/run", ""),
    ("growth rollback {}/run --to 2", ""),
    ("checkpoint list {}/run", ""),
    ("checkpoint verify {}/run", ""),
    ("convert {}/run --out out", ""),
    ("convert run --out {}/out", "--out: "),
    ("import {}/model --out out", ""),
    ("eval perplexity {}/model text.jsonl", ""),
    ("bench checkpoint --scratch {}/scratch", "--scratch: "),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    return runs.write_run(tmp_path / "run.yaml", Path("data"), telemetry={"enabled": False})


@pytest.mark.parametrize(("use", "field"), USES)
def test_a_name_that_is_too_long_is_a_traceback(
    here: Path, capsys: pytest.CaptureFixture[str], use: str, field: str
) -> None:
    assert main(use.format(LONG).split()) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sgt-ds: {LONG}/")
    fault = line.partition(": ")[2].partition(": ")[2]
    assert fault.endswith("(File name too long); use a shorter name")
    assert fault.startswith(f"{field}cannot be ")


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run with a folder `closed` that nobody may enter; the current directory."""
    root = Path(tempfile.mkdtemp(dir="/tmp", prefix="sgt-ds-refused-"))  # pytest's own is closed
    root.chmod(0o755)
    runs.write_run(root / "run.yaml", Path("data"), telemetry={"enabled": False})
    (root / "hosts").write_text("localhost slots=1\n")
    monkeypatch.chdir(root)
    for folder in ("closed", "run/checkpoints/step-00000002", "set"):
        (root / folder).mkdir(parents=True)
    for file in ("closed/run.yaml", "set/manifest.json", "run/run.yaml"):
        shutil.copy("run.yaml", file)
    for path in ("closed", "run/checkpoints", "set/manifest.json"):
        Path(path).chmod(0)
    yield root
    subprocess.run(["chmod", "-R", "u+rwX", root], check=True)
    shutil.rmtree(root)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ("config closed/run.yaml", "closed/run.yaml: cannot be used"),
        ("train closed/run.yaml", "closed/run.yaml: cannot be used"),
        ("monitor targets hosts --run r --out closed/t", "closed/t: --out: cannot be written"),
        ("checkpoint list run", "run/checkpoints: cannot be used"),
        ("data verify set", "set/manifest.json: cannot be read"),
    ],
)
def test_a_folder_that_may_not_be_entered_is_a_traceback_or_a_full_disk(
    closed: Path, capsys: pytest.CaptureFixture[str], use: str, said: str
) -> None:
    with runs.nobody():
        assert main(use.split()) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sgt-ds: {said} (Permission denied); allow access to it")
    assert "disk" not in line
    assert "again" not in line


def test_a_rank_tells_a_refused_path_in_a_traceback(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(["run.yaml", f"deepspeed={LONG}/zero.json"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sgt-ds train: {LONG}/zero.json: deepspeed: cannot be used")


def test_a_loop_of_links_is_a_traceback(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("loop").symlink_to("loop")
    assert main(["report", "loop", "-o", "r.html"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "loop: " in line


def test_a_fault_of_the_machine_or_of_ours_is_told_as_the_users() -> None:
    full = refused_by_system(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a/b"))
    assert str(full) == "a/b: cannot be used (No space left on device); free disk space"
    assert isinstance(full, SgtError)
    assert not isinstance(full, UserError)
    bug = RuntimeError("bug")
    bug.__context__ = FileNotFoundError(errno.ENOENT, "gone", "a")
    for ours in (BrokenPipeError(errno.EPIPE, "gone"), OSError("no number"), bug):
        assert refused_by_system(ours) is None


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    ],
)
def test_text_that_stdout_cannot_encode_is_a_traceback(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sgt_ds", "plan", "--preset", "tiny"],
        env={**os.environ, **environment},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b" ? 4 heads" in done.stdout


def test_printing_a_path_that_is_no_text_is_a_traceback(here: Path) -> None:
    name = os.fsdecode(b"targets-\xff.json")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "sgt_ds",
            "monitor",
            "targets",
            "hosts",
            "--run",
            "r",
            "--out",
            name,
        ],
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"targets-\xff.json: ")
