"""Scores held against the model asked one choice at a time in float64, and against hand counts."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import task_rows
import torch
import zstandard
from task_rows import POSITIONS
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, LlamaForCausalLM

from sgt_ds.cli import main
from sgt_ds.config import EvaluationConfig
from sgt_ds.errors import UserError
from sgt_ds.evaluation import (
    TASKS,
    Item,
    ItemResult,
    Questions,
    Suite,
    TrainingEncoder,
    check_evaluation,
    compare,
    find_tasks,
    load_questions,
    read_items,
)
from sgt_ds.evaluation.comparison import bootstrap_means, mcnemar
from sgt_ds.evaluation.encoding import requests_of
from sgt_ds.inference import load_scored_model


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task_rows.write_rows(tmp_path_factory.mktemp("rows"), task_rows.made_rows())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stock LLaMA, as a vanilla export is."""
    return task_rows.write_model(tmp_path_factory.mktemp("models") / "llama", loops=False)


@pytest.fixture(scope="module")
def items_file(tmp_path_factory: pytest.TempPathFactory, folder: Path, rows: Path) -> Path:
    """Item results of all tasks by both rules, from the command."""
    out = tmp_path_factory.mktemp("items") / "llama.jsonl"
    command = ["eval", "tasks", str(folder), "--tasks", "all", "--data", str(rows)]
    assert main([*command, "--rule", "both", "--out", str(out), "--batch-tokens", "300"]) == 0
    return out


def alone(model: Any, context: list[int], continuation: list[int]) -> float:
    """One choice by itself: no batch, no padding, float64."""
    ids = torch.tensor([[*context, *continuation][-POSITIONS - 1 :]])
    with torch.no_grad():
        log_probabilities = model(ids[:, :-1]).logits.log_softmax(-1)
    targets = ids[0, -len(continuation) :]
    picked = log_probabilities[0, -len(continuation) :].gather(-1, targets[:, None])
    return float(picked.sum())


def test_a_batch_padding_or_a_shared_row_changes_what_a_choice_scores(
    items_file: Path, folder: Path, rows: Path
) -> None:
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    results = {(item.task, item.rule, item.index): item for item in read_items(items_file)}
    assert {task for task, _, _ in results} == set(TASKS)
    differences = []
    for rule in ("olmo", "lm_eval"):
        for name in TASKS:
            for index, item in enumerate(load_questions(TASKS[name], rule, str(rows)).items):  # type: ignore[arg-type]
                found = results[name, rule, index]
                for place, text in enumerate(item.continuations):
                    context = tokenizer.encode(item.contexts[place])
                    whole = tokenizer.encode(item.contexts[place] + text)
                    joint = whole[len(context) :] if rule == "lm_eval" else tokenizer.encode(text)
                    expected = alone(model, context, joint)
                    differences.append(abs(found.log_likelihoods[place] - expected))
    assert len(differences) > 700
    assert max(differences) < 2e-4  # float32 sums of a few tens of terms against float64


def test_prompts_part_from_what_the_rules_say(rows: Path) -> None:
    def first(task: str, rule: Any) -> tuple[Any, dict[str, Any]]:
        item = load_questions(TASKS[task], rule, str(rows), limit=1).items[0]
        text = (rows / TASKS[task].folder / "validation.jsonl").read_text(encoding="utf-8")
        return item, json.loads(text.splitlines()[0])

    item, row = first("commonsense_qa", "olmo")
    assert item.contexts[0] == f"Question: {row['question']}\nAnswer:"
    assert item.continuations == tuple(f" {text}" for text in row["choices"]["text"])
    item, row = first("commonsense_qa", "lm_eval")
    assert item.contexts[0].endswith(f"\nE. {row['choices']['text'][4]}\nAnswer:")
    assert item.continuations == (" A", " B", " C", " D", " E")
    item, row = first("winogrande", "olmo")
    head, tail = row["sentence"].split("_")
    assert item.contexts == (head + row["option1"], head + row["option2"])
    assert item.continuations == (f" {tail.strip()}",) * 2
    item, row = first("social_iqa", "lm_eval")
    assert item.contexts[0] == f"Q: {row['context']} {row['question']}\nA:"
    item, row = first("hellaswag", "olmo")
    assert "[" not in item.contexts[0] + item.continuations[0]
    assert item.contexts[0].startswith(f"{row['activity_label']}: {row['ctx_a'].split()[0]}")
    assert " How.  so" in item.contexts[0] or " How. so" in item.contexts[0]
    # Anatomy counts as medicine to one harness and as science to the other.
    assert len(load_questions(TASKS["mmlu_stem"], "lm_eval", str(rows)).items) == 10
    assert len(load_questions(TASKS["mmlu_stem"], "olmo", str(rows)).items) == 5


def test_both_rules_cut_a_text_in_one_way(tmp_path: Path, rows: Path) -> None:
    """With a token of a colon and a space, a choice behind `Answer:` begins within a token."""
    letters = sorted(set((rows / "arc_easy" / "validation.jsonl").read_text(encoding="utf-8")))
    names = ["</s>", *letters, "A", "Q", "\n", ": "]
    vocabulary = {name: index for index, name in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(":", " ")], unk_token="</s>"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = TrainingEncoder.from_file(tmp_path / "tokenizer.json")

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text).ids)

    apart, together = (
        load_questions(TASKS["arc_easy"], rule, str(rows)) for rule in ("olmo", "lm_eval")
    )
    front, text = apart.items[0].contexts[0], apart.items[0].continuations[0]
    one = next(requests_of(apart, encoder, 999))
    assert [*one.ids, one.targets[-1]] == ids(front) + ids(text)
    assert list(one.targets) == ids(text)
    other = next(requests_of(together, encoder, 999))
    assert list(other.targets) == ids(front + text)[len(ids(front)) :] == ids(text[1:])
    # Spaces at a context's end belong to what follows; an empty one is the end of another text.
    spaced = Item("0", ("river stone  ", ""), ("lamp", "lamp"), 0)
    first, second = requests_of(Questions(TASKS["sciq"], "lm_eval", [spaced]), encoder, POSITIONS)
    assert list(first.targets) == ids("river stone  lamp")[len(ids("river stone")) :]
    assert second.ids[0] == 0
    assert list(second.targets) == ids("lamp")
    with pytest.raises(
        UserError, match=r"^sciq: item 0: its scored text has \d+ tokens, more than"
    ):
        list(requests_of(Questions(TASKS["sciq"], "lm_eval", [spaced]), encoder, 2))


def test_normalisation_counts_other_characters(items_file: Path, rows: Path) -> None:
    for item in read_items(items_file):
        if item.task != "sciq":
            continue
        row = json.loads((rows / "sciq" / "validation.jsonl").read_text().splitlines()[item.index])
        names = ("distractor1", "distractor2", "distractor3", "correct_answer")
        each = [v / len(row[n]) for v, n in zip(item.log_likelihoods, names, strict=True)]
        assert item.choice("acc_norm") == each.index(max(each))
        assert item.choice("acc") == item.log_likelihoods.index(max(item.log_likelihoods))
        size = len(row["correct_answer"].encode())
        assert item.score("bpb") == pytest.approx(-item.log_likelihoods[3] / size / math.log(2))


def test_a_share_of_the_work_gives_other_numbers_than_the_whole(folder: Path, rows: Path) -> None:
    model = load_scored_model(folder, device="cpu")
    questions = [load_questions(task, "olmo", str(rows)) for task in find_tasks("sciq,mmlu")]
    suite = Suite(questions, model.encoder, positions=POSITIONS, batch_tokens=200)
    whole = suite.score(model.logits, model.device)
    for world_size in (2, 3):
        shares = [
            suite.score(model.logits, model.device, share=slice(rank, None, world_size))
            for rank in range(world_size)
        ]
        assert all(int((share != 0).sum()) > 0 for share in shares)
        assert torch.equal(sum(shares), whole)  # type: ignore[arg-type]


def test_rows_from_packed_files_or_through_datasets_differ(tmp_path: Path, rows: Path) -> None:
    content = (rows / "arc_easy" / "validation.jsonl").read_bytes()
    task = TASKS["arc_easy"]
    plain = load_questions(task, "olmo", str(rows)).items
    (tmp_path / "test.jsonl.gz").write_bytes(gzip.compress(content))
    (tmp_path / "validation.jsonl.zst").write_bytes(zstandard.compress(content))
    assert load_questions(task, "olmo", str(tmp_path)).items == plain
    assert load_questions(task, "olmo", str(tmp_path), split="test").items == plain
    url = f"file://{rows}"
    assert load_questions(task, "olmo", url).items == plain
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    datasets.config.HF_DATASETS_CACHE = str(tmp_path / "cache")
    hub = f"datasets:{rows / 'arc_easy'}"
    assert load_questions(task, "olmo", hub).items == plain


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            '{"question": "Who?"}',
            "line 2: has no 'choices' that arc_easy can use; give rows in the format of "
            "allenai/ai2_arc, or",
        ),
        ('{"question": "Who?", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "B"}', "B"),
        ("[1, 2]", "line 2: is not a JSON object"),
        ("{", "line 2: is not JSON"),
    ],
)
def test_a_row_of_another_form_ends_in_a_traceback(
    tmp_path: Path, rows: Path, line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good = (rows / "arc_easy" / "validation.jsonl").read_text(encoding="utf-8").splitlines()[0]
    (tmp_path / "validation.jsonl").write_text(f"{good}\n{line}\n", encoding="utf-8")
    command = ["eval", "tasks", str(tmp_path), "--data", str(tmp_path)]
    assert main([*command, "--tasks", "arc_easy"]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert main([*command, "--tasks", "arc_hard"]) == 2
    assert "'arc_hard' is unknown; did you mean 'arc_easy'?" in capsys.readouterr().err
    assert main([*command, "--tasks", "sciq"]) == 2


@pytest.mark.parametrize(
    ("data", "fault"),
    [("nowhere", "does not exist"), (".", "holds neither validation.jsonl nor sciq")],
)
def test_data_that_is_not_there_is_told_of_no_flag(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data: str,
    fault: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "tasks", str(tmp_path), "--tasks", "sciq", "--data", data]) == 2
    assert capsys.readouterr().err.startswith(f"sgt-ds: {data}: --data: {fault}")


def test_items_that_cannot_be_written_take_the_scores_along(
    tmp_path: Path,
    folder: Path,
    rows: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["eval", "tasks", str(folder), "--tasks", "sciq", "--data", str(rows), "--limit", "2"]
    nowhere = tmp_path / "link"
    nowhere.symlink_to(tmp_path / "none" / "x.jsonl")
    earlier = tmp_path / "earlier.jsonl"
    earlier.write_text("scores of other tasks")
    with monkeypatch.context() as early:
        early.setattr(Suite, "score", None)  # told before anything is scored
        for out, said in (
            ("/proc/x.jsonl", "cannot be written"),
            (str(tmp_path / "none" / "x.jsonl"), "is not a folder"),
            (str(tmp_path), "is not a file name"),
            (str(nowhere), "is not a folder"),
            (str(tmp_path / ("x" * 250)), "cannot be written"),
            (str(tmp_path / ("x" * 300)), "cannot be written"),
            (str(earlier), "exists already; give another --out, or remove it"),
        ):
            assert main([*command, "--out", out]) == 2
            told = capsys.readouterr()
            assert "--out: " in told.err
            assert said in told.err
            assert (told.out, told.err.count("\n")) == ("", 1)
    assert earlier.read_text() == "scores of other tasks"
    earlier.unlink()
    nowhere.unlink()
    out = tmp_path / "x.jsonl"
    out.touch()

    def full(path: Path, results: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as late:
        late.setattr("sgt_ds.evaluation.results.write_items", full)
        assert main([*command, "--out", str(out)]) == 2
    told = capsys.readouterr()
    assert told.out.startswith("task")
    assert "sciq" in told.out
    line = told.err.splitlines()[-1]
    assert line.startswith(f"sgt-ds: --out: {out} cannot be written (No space left on device); ")
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]
    assert out.read_text() == ""
    nowhere.symlink_to(out)
    assert main([*command, "--out", str(nowhere)]) == 0
    assert len(out.read_text().splitlines()) == 2
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert main([*command, "--out", str(pipe)]) == 0
    assert os.read(reader, 1 << 16) == out.read_bytes()
    os.close(reader)


def test_without_a_network_nobody_says_what_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", "tasks", str(tmp_path), "--tasks", "sciq"]
    remedy = "give --data FOLDER containing sciq/validation.jsonl"
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "datasets", None)
        assert main(command) == 2
    assert remedy in capsys.readouterr().err.splitlines()[-1]
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert main(command) == 2
    assert remedy in capsys.readouterr().err.splitlines()[-1]


def test_a_package_that_evaluation_lacks_is_found_by_a_rank_after_the_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = pytest.importorskip("fsspec.registry", reason="needs the package fsspec")
    for package, key, settings, remedy in (
        ("s3fs", "tasks.0", {"tasks": [{"name": "sciq", "path": "s3://b/x"}]}, "sgt-ds[remote]"),
        (
            "gcsfs",
            "perplexity.0",
            {"perplexity": [{"name": "t", "path": "gs://b/x"}]},
            "sgt-ds[remote]",
        ),
        (
            "datasets",
            "tasks.0",
            {"tasks": [{"name": "sciq", "path": "datasets"}]},
            "give path: FOLDER containing sciq/validation.jsonl",
        ),
    ):
        config = EvaluationConfig.model_validate(settings)
        with monkeypatch.context() as without:
            without.setitem(sys.modules, package, None)
            for protocol in ("s3", "gs"):  # which fsspec may have loaded
                without.delitem(loaded._registry, protocol, raising=False)
            with pytest.raises(UserError) as caught:
                check_evaluation(config, "run.yaml")
        assert caught.value.field == f"evaluation.{key}.path"
        assert remedy in caught.value.message


def item(index: int, right: bool, bits: float = 1.0) -> ItemResult:
    values = (-bits * math.log(2), -bits * math.log(2) - (1 if right else -1))
    return ItemResult("sciq", "olmo", index, str(index), "x", 0, values, (1, 1), 1)


def test_a_folder_brings_its_own_code_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody says otherwise, transformers asks on the terminal; a pipe may say yes."""
    folder = task_rows.write_model(tmp_path / "model", loops=False)
    config = json.loads((folder / "config.json").read_text())
    config.update(
        model_type="theirs", auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    )
    (folder / "config.json").write_text(json.dumps(config))
    ran = tmp_path / "ran"
    (folder / "code.py").write_text(f"open({str(ran)!r}, 'w')\nclass C: pass\nclass M: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_scored_model(folder, device="cpu")
    assert not ran.exists()


def test_the_paired_comparison_miscounts(tmp_path: Path) -> None:
    random.seed(3)
    first = [item(index, random.random() < 0.5) for index in range(400)]
    second = [item(index, random.random() < 0.6) for index in range(400)]
    a, b = (np.array([each.score("acc") for each in side]) for side in (first, second))
    rows = compare((tmp_path / "a", first), (tmp_path / "b", second), metric="acc")
    (row,) = rows
    assert (row.first, row.second) == (a.mean(), b.mean())
    assert row.only_first == int(((a == 1) & (b == 0)).sum())
    # The bootstrap's interval is near the normal one at this size.
    half = 1.96 * (b - a).std() / 20
    assert abs(row.low - (row.difference - half)) < 0.01
    assert abs(row.high - (row.difference + half)) < 0.01
    # Fewer items, or other ones, are no pairs.
    with pytest.raises(UserError, match="has 399 items"):
        compare((tmp_path / "a", first), (tmp_path / "b", second[1:]))
    other = [*second[:-1], ItemResult("sciq", "olmo", 399, "y", "y", 0, (0.0, 1.0), (1, 1), 1)]
    with pytest.raises(UserError, match="is not item"):
        compare((tmp_path / "a", first), (tmp_path / "b", other))
    by_other_rule = [replace(each, rule="lm_eval") for each in second]
    with pytest.raises(UserError, match="; score both models with the same --tasks and --rule"):
        compare((tmp_path / "a", first), (tmp_path / "b", by_other_rule))


def test_mcnemar_and_bootstrap_part_from_scipys() -> None:
    stats = pytest.importorskip("scipy.stats", reason="needs scipy")
    for only_first, only_second in ((0, 0), (3, 9), (120, 80), (1500, 1500), (2000, 1800)):
        total = only_first + only_second
        expected = stats.binomtest(only_first, total, 0.5).pvalue if total else 1.0
        assert mcnemar(only_first, only_second) == pytest.approx(expected, rel=1e-9)
    generator = np.random.default_rng(0)
    for differences in (
        generator.choice([-1.0, 0.0, 1.0], 300, p=[0.1, 0.7, 0.2]),
        generator.normal(0.1, 1.0, 300),
    ):
        means = bootstrap_means(differences, 20_000, np.random.default_rng(1))
        ours = np.quantile(means, [0.025, 0.975])
        theirs = stats.bootstrap(
            (differences,), np.mean, n_resamples=20_000, method="percentile", random_state=2
        ).confidence_interval
        spread = differences.std() / math.sqrt(300)
        assert np.allclose(ours, theirs, atol=0.1 * spread)


def test_two_files_of_items_cannot_be_compared(
    items_file: Path, tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = task_rows.write_model(tmp_path / "other", loops=True, seed=1)
    out = tmp_path / "other.jsonl"
    command = ["eval", "tasks", str(other), "--tasks", "all", "--data", str(rows), "--json"]
    assert main([*command, "--out", str(out)]) == 0
    scores = {row["task"]: row for row in json.loads(capsys.readouterr().out)["tasks"]}
    assert main(["eval", "compare", str(items_file), str(out), "--json"]) == 0
    table = json.loads(capsys.readouterr().out)["comparisons"]
    assert [row["task"] for row in table] == [*TASKS, "mean"]
    for row in table[:-1]:
        assert row["second"] == pytest.approx(scores[row["task"]][row["metric"]])
        assert row["low"] <= row["difference"] <= row["high"]
    assert table[-1]["second"] == pytest.approx(np.mean([row["second"] for row in table[:-1]]))
    bad = tmp_path / "bad.jsonl"
    first = items_file.read_text().splitlines()[0]
    item = json.loads(first)
    for lines, told in (
        (['{"loss": 3.1}'], "line 1, task: Field required"),
        ([first, "loss 3.1"], "line 2: is not JSON"),
        (["[1, 2]"], "line 1: Input should be"),
        ([json.dumps({**item, "rule": "ours"})], "line 1, rule: Input should be"),
        ([json.dumps({**item, "answer": 9})], "line 1, answer: 9 is not one of the"),
        ([json.dumps({**item, "characters": []})], "line 1, characters: must be"),
    ):
        bad.write_text("".join(f"{line}\n" for line in lines))
        assert main(["eval", "compare", str(items_file), str(bad)]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"sgt-ds: {bad}: {told}"), err
        assert err.endswith("; give a file written by `eval tasks --out`\n"), err
