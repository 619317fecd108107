"""What long work says of itself where nobody watches a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time

import pytest

from sgt_ds.progress import LINE_EVERY_SECONDS, Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds, as the only element."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_the_end_is_told_twice(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("window 256", 20_000, "tokens") as progress:
        for _ in range(2):
            clock[0] += LINE_EVERY_SECONDS
            progress.advance(10_000)
    assert capsys.readouterr().err.splitlines() == [
        "window 256: 10,000/20,000 tokens  1,000.0 tokens/s  ETA 10s",
        "window 256: 20,000/20,000 tokens  1,000.0 tokens/s  done",
    ]


@pytest.mark.parametrize(
    ("size", "line"),
    [
        (9_999, "verify: 9,999/9,999 B  4,999.5 B/s  done"),
        (40_400, "verify: 40/40 kB  20.2 kB/s  done"),
        (107_610_235, "verify: 108/108 MB  53.8 MB/s  done"),
        (240_000_000_000, "verify: 240/240 GB  120.0 GB/s  done"),
    ],
)
def test_bytes_are_told_digit_by_digit(
    size: int, line: str, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("verify", size, "B") as progress:
        clock[0] += 2
        progress.advance(size)
    assert capsys.readouterr().err == f"{line}\n"


def test_a_terminal_that_tells_no_size_shows_nothing() -> None:
    ours, theirs = pty.openpty()
    program = "from sgt_ds.progress import Progress\nwith Progress('verify', 10, 'B') as bar:\n"
    subprocess.run([sys.executable, "-c", f"{program}    bar.advance(10)"], stderr=theirs)
    shown = os.read(ours, 10_000).decode()
    assert "verify: 100%" in shown
    assert "10.0/10.0" in shown
