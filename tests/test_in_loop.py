"""Evaluation while a run trains: it changes nothing, and every number of ranks finds the same."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import runs
from token_sets import write_token_set
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from sgt_ds.cli import main
from sgt_ds.config import PRESETS, TelemetryConfig
from sgt_ds.evaluation import read_items
from sgt_ds.telemetry import Exporter

pytestmark = pytest.mark.launcher


def question(generator: random.Random) -> dict[str, Any]:
    """A question of one word, with four words to choose from."""
    words = [f"w{generator.randrange(runs.VOCABULARY)}" for _ in range(5)]
    answer = "ABCD"[generator.randrange(4)]
    choices = {"text": words[:4], "label": list("ABCD")}
    return {"id": words[4], "question": words[4], "choices": choices, "answerKey": answer}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared sets, and questions in their words."""
    folder = tmp_path_factory.mktemp("data")
    words = {f"w{number}": number for number in range(runs.VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    for name, tokens, seed in (("train", 40_000, 1), ("val", 4_000, 3)):
        write_token_set(
            folder / name,
            [runs.markov_text(tokens, seed)],
            vocab_size=runs.VOCABULARY,
            tokenizer=tokenizer.to_str().encode(),
        )
    generator = random.Random(0)
    lines = [json.dumps(question(generator)) + "\n" for _ in range(30)]
    (folder / "arc.jsonl").write_text("".join(lines))
    (folder / "stem.jsonl").write_text("".join(lines).replace('"question"', '"question_stem"'))
    return folder


def evaluation(data: Path) -> dict[str, Any]:
    """Scored in an entry window (step 5), in the fixed phase, and at the end."""
    return {
        "every": 5,
        "tasks": [
            {"name": "openbookqa", "path": str(data / "stem.jsonl")},
            {"name": "arc_easy", "path": str(data / "arc.jsonl"), "limit": 20},
        ],
        "perplexity": [{"name": "chain", "path": str(data / "val"), "tokens": 1024}],
        "batch_tokens": 256,
    }


def scores(run_dir: Path) -> dict[int, Any]:
    """By step."""
    rows = runs.metrics(run_dir)
    return {row["step"]: row["evaluation"] for row in rows if "evaluation" in row}


def test_a_run_that_is_scored_trains_otherwise_or_ranks_find_other_scores(
    tmp_path: Path, data: Path
) -> None:
    plain = runs.write_run(tmp_path / "plain.yaml", data)
    settings = evaluation(data)
    settings["perplexity"][0]["path"] = (data / "val").as_uri()
    scored = runs.write_run(
        tmp_path / "scored.yaml",
        data,
        evaluation=settings,
        data={"cache_dir": str(tmp_path / "cache")},
    )
    runs.run_to_end(runs.launcher(plain, 2))
    runs.run_to_end(runs.launcher(scored, 2))
    of_plain, of_scored = tmp_path / "plain", tmp_path / "scored"
    assert runs.losses(of_plain) == runs.losses(of_scored)
    assert runs.journal_lines(of_plain) == runs.journal_lines(of_scored)
    found = scores(of_scored)
    assert sorted(found) == [5, 10, 15, 20]
    assert set(found[20]) == {"openbookqa", "arc_easy", "chain"}
    assert len(list((tmp_path / "cache").glob("*/*.tokens"))) == 1, "kept elsewhere than the run's"
    # The text is what is validated, and the loops of the moment are in it.
    rows = runs.metrics(of_scored)
    validated = {r["step"]: r["validation_loss"] for r in rows if "validation_loss" in r}
    for step in (10, 20):
        assert found[step]["chain"]["loss"] == pytest.approx(validated[step], rel=1e-6)
    items = {path.name: path.read_text() for path in (of_scored / "evaluations").iterdir()}
    assert sorted(items) == [f"step-{step:08d}.jsonl" for step in (5, 10, 15, 20)]
    results = read_items(of_scored / "evaluations" / "step-00000020.jsonl")
    assert len(results) == 50
    right = [item.score("acc") for item in results if item.task == "arc_easy"]
    assert found[20]["arc_easy"]["acc"] == sum(right) / 20
    assert len({item.log_likelihoods for item in results}) == 50
    # The checkpoint of that step, and its export, say the same: Θ is in all three.
    assert (
        main(["convert", str(of_scored), "--out", str(tmp_path / "export"), "--dtype", "fp32"]) == 0
    )
    arc = [item for item in results if item.task == "arc_easy"]
    for model in (of_scored, tmp_path / "export"):
        out = tmp_path / f"{model.name}.jsonl"
        command = ["eval", "tasks", str(model), "--tasks", "arc_easy", "--limit", "20"]
        assert main([*command, "--data", str(data / "arc.jsonl"), "--out", str(out)]) == 0
        for ours, theirs in zip(arc, read_items(out), strict=True):
            assert theirs.sha256 == ours.sha256
            assert theirs.log_likelihoods == pytest.approx(ours.log_likelihoods, abs=1e-4)


def test_scores_are_not_served() -> None:
    exporter = Exporter(
        TelemetryConfig(), run_wide=True, local_rank=0, rank=0, info={}, model=PRESETS["tiny"]
    )
    exporter.publish_evaluation({"sciq": {"acc": 0.25}, "chain": {"loss": 3.5}})
    samples = {
        (sample.labels["task"], sample.labels["metric"]): sample.value
        for family in exporter.collect()
        for sample in family.samples
        if sample.name == "sgt_evaluation_score"
    }
    assert samples == {("sciq", "acc"): 0.25, ("chain", "loss"): 3.5}


def test_rows_of_another_task_end_in_a_traceback(tmp_path: Path, data: Path) -> None:
    wrong = {"tasks": [{"name": "sciq", "path": str(data / "arc.jsonl")}]}
    run = runs.write_run(tmp_path / "run.yaml", data, evaluation=wrong)
    told = runs.run_to_end(runs.single(run), expect=2)
    assert "arc.jsonl: line 1: has no 'support' that sciq can use" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"tasks": [{"name": "arc_easy", "path": "arc"}, {"name": "arc_esay", "path": "arc"}]},
            "{run}: evaluation.tasks.1.name: 'arc_esay' is unknown; did you mean 'arc_easy'?",
        ),
        (
            {"tasks": [{"name": "mmlu_stem", "path": "."}, {"name": "mmlu", "path": "."}]},
            "{run}: evaluation.tasks.1.name: 'mmlu_stem' appears twice",
        ),
        (
            {"perplexity": [{"name": "val", "path": "a.txt"}, {"name": "val", "path": "b.txt"}]},
            "{run}: evaluation.perplexity.1.name: 'val' appears twice",
        ),
        (
            {"tasks": [{"name": "sciq", "path": "{data}/none"}]},
            "{data}/none: evaluation.tasks.0.path: does not exist",
        ),
        (
            {"tasks": [{"name": "sciq", "path": "{data}/arc.jsonl"}]},
            "{data}/arc.jsonl: line 1: has no 'support' that sciq can use",
        ),
        (
            {"perplexity": [{"name": "val", "path": "{data}/none.txt"}]},
            "{data}/none.txt: evaluation.perplexity.0.path: no such file",
        ),
        (
            {"perplexity": [{"name": "val", "path": "{data}"}]},
            "{data}: evaluation.perplexity.0.path: ",
        ),
    ],
)
def test_an_evaluation_that_cannot_be_is_found_out_by_the_ranks(
    settings: dict[str, Any],
    told: str,
    tmp_path: Path,
    data: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    given = json.loads(json.dumps(settings).replace("{data}", str(data)))
    run = runs.write_run(
        tmp_path / "run.yaml", data, evaluation=given, telemetry={"enabled": False}
    )
    line = told.format(run=run, data=data)
    verbs = ("train", "config") if told.startswith("{run}") else ("train",)
    for verb in verbs:
        assert main([verb, str(run)]) == 2
        said = capfd.readouterr()
        assert said.err.startswith(f"sgt-ds: {line}")
        assert (said.out, said.err.count("\n")) == ("", 1)
    assert not (tmp_path / "run").exists()


def test_items_that_cannot_be_written_end_the_run(tmp_path: Path, data: Path) -> None:
    run = runs.write_run(
        tmp_path / "run.yaml", data, training={"steps": 2}, evaluation=evaluation(data)
    )
    (tmp_path / "run" / "control" / "ranks").mkdir(parents=True)
    (tmp_path / "run" / "evaluations").write_text("no folder")
    told = runs.run_to_end(runs.single(run))
    assert "step-00000002.jsonl was not written (" in told
    assert set(scores(tmp_path / "run")[2]) == {"openbookqa", "arc_easy", "chain"}
