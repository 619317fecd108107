"""`sgt-ds bench growth`: what it reads from a run, and bad usage. The runs of it are bench train's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_pages import write_run as write_grown_run
from runs import write_data, write_run

import sgt_ds.launch
from sgt_ds.cli import main
from sgt_ds.config import load_run_config
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
        (pause.step, pause.what, pause.decided, pytest.approx(pause.seconds))
        for pause in growth_pauses(read_history(run))
    ]
    assert told == [
        (0, "first update", False, 8.5),
        (40, "layer 4 ×1 of all heads, with factors", True, 5.2),
        (60, "layer 4 ×2 of 2 heads", True, 3.0),
        (80, "layer 2 ×1 of all heads, with factors", True, 2.1),
        (100, "layer 2 ×2 of 2 heads", True, 1.0),
    ]


def test_a_second_run_gets_another_cache_or_other_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[tuple[list[str], dict[str, str]]] = []

    def grown(
        name: str, words: list[str], ranks: int, output: Path, environ: dict[str, str]
    ) -> None:
        given.append((words, environ))
        folder = output.with_suffix("")
        write_grown_run(folder)
        (folder / "checkpoints").mkdir()
        row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
        rows = [{**row, "step": n, "step_seconds": SLOW.get(n, USUAL)} for n in range(1, 121)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if folder.name == "ahead":
            log = folder / "logs" / "rank-00000.log"
            log.write_text(
                "2026 INFO step 9: x\n2026 INFO 3 kinds of block compiled ahead in 7 s\n"
            )

    # Compiling three times takes minutes; the launch is the same as the one of bench train.
    monkeypatch.setattr(sgt_ds.launch, "launch_one", grown)
    run = write_run(
        tmp_path / "run.yaml",
        write_data(tmp_path / "data"),
        training={"compile": True},
        growth={"entropy_every": 7, "freeze_at": 4},
    )
    scratch = tmp_path / "it is: here"
    words = ["--scratch", str(scratch), "--json"]
    assert main(["bench", "growth", str(run), *words]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["complete"]
    assert (document["events_possible"], document["runs"]["kept"]["events"]) == (6, 4)
    caches = []
    for (module, file, *overrides), environ in given:
        assert (module, file) == ("sgt_ds.train", str(run))
        config = load_run_config(run, overrides)
        assert (config.growth.entropy_every, config.growth.freeze_at) == (1, None)
        ahead = config.run_dir.name == "ahead"
        assert config.training.compile_ahead == ahead
        # Four times what the cold run lost: 19.8 s, in updates of 0.5 s.
        first = 8 + 159 if ahead else 8
        windows = (config.growth.t_start, config.growth.interval, config.training.steps)
        assert windows == (first, 8, first + 56)
        assert config.run_dir.parent == scratch
        caches.append((config.training.compile_cache, environ["TORCHINDUCTOR_CACHE_DIR"]))
    (cold, one), (own, another), (kept, third) = caches
    assert cold == kept == scratch / "compiled"
    assert own != cold
    assert len({one, another, third}) == 3
    said = "3 kinds of block compiled ahead in 7 s"
    assert document["ahead"] == {"first_window": 167, "said": said}
    assert not list(scratch.glob("*/checkpoints"))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("training.compile=false", "training.compile: is false"),
        ("method=vanilla", "method: is vanilla"),
        ("growth.heads=99", "growth.heads"),
        ("deepspeed=nope.json", "nope.json"),
        ("data.train=nope", "nope"),
        ("growth={entropy_every: 7}", "growth.entropy_every: is set by the benchmark itself"),
        ("run_dir=mine", "run_dir: is set by the benchmark itself"),
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
