"""`sgt-ds bench growth`: what it reads from a run, and bad usage. The runs of it are bench train's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_pages import write_run as write_grown_run
from runs import write_data, write_run

from sgt_ds.cli import main
from sgt_ds.report import growth_pauses, read_history

# report_pages' run: layer 4 enters at 40, deepens at 60, layer 2 enters at 80, deepens at 100.
SLOW = {1: 9.0, 40: 0.7, 41: 5.5, 61: 3.5, 80: 0.6, 81: 2.5, 101: 1.5}
USUAL = 0.5


def test_an_update_that_took_longer_than_usual_is_not_counted_for_its_change(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    write_grown_run(run)
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    rows = [{**row, "step": n, "step_seconds": SLOW.get(n, USUAL)} for n in range(1, 121)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = [
        (pause.step, pause.what, pytest.approx(pause.seconds))
        for pause in growth_pauses(read_history(run))
    ]
    assert told == [
        (0, "first update", 8.5),
        (40, "layer 4 ×1 of all heads, with factors", 5.2),
        (60, "layer 4 ×2 of 2 heads", 3.0),
        (80, "layer 2 ×1 of all heads, with factors", 2.1),
        (100, "layer 2 ×2 of 2 heads", 1.0),
    ]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("training.compile=false", "training.compile: is false"),
        ("method=vanilla", "method: is vanilla"),
        ("growth.heads=99", "growth.heads"),
    ],
)
def test_a_run_that_cannot_grow_or_compile_is_benched(
    override: str, named: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = write_run(
        tmp_path / "run.yaml", write_data(tmp_path / "data"), training={"compile": True}
    )
    assert main(["bench", "growth", str(run), override]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert named in err
