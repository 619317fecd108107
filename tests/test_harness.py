"""Our scores held against lm-evaluation-harness itself: its prompts, its code, our export."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import task_rows
import yaml

from sgt_ds.evaluation import Suite, TaskResult, find_tasks, load_questions
from sgt_ds.inference import load_scored_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval: pip install 'sgt-ds[eval]'"
)

# The harness's own definitions, below its `tasks`: prompts and choices are read from there.
DEFINITIONS = {
    "arc_easy": "arc/arc_easy.yaml",
    "winogrande": "winogrande/default.yaml",
    "social_iqa": "siqa/siqa.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "commonsense_qa": "commonsense_qa/default.yaml",
    "sciq": "sciq/sciq.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "mmlu_stem": "mmlu/default/mmlu_astronomy.yaml",
    "mmlu_humanities": "mmlu/default/mmlu_world_religions.yaml",
    "mmlu_social_sciences": "mmlu/default/mmlu_econometrics.yaml",
    "mmlu_other": "mmlu/default/mmlu_marketing.yaml",
}
# float32 sums of a few tens of terms, in batches of other shapes.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of all tasks; of MMLU only the subjects that the definitions above ask for."""
    made = task_rows.made_rows()
    made["mmlu"] = [row for row in made["mmlu"] if row["subject"] != "anatomy"]
    return task_rows.write_rows(tmp_path_factory.mktemp("rows"), made)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task_rows.write_model(tmp_path_factory.mktemp("models") / "sgt", loops=True)


def write_definitions(folder: Path, rows: Path) -> Path:
    """The harness's definitions, reading our files; nothing but the data's place is changed."""
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None
    assert spec.origin is not None
    theirs = Path(spec.origin).parent / "tasks"
    folder.mkdir()
    for name, file in DEFINITIONS.items():
        task = find_tasks(name)[0]
        data = rows / task.folder / "validation.jsonl"
        if task.folder == "mmlu":
            subject = Path(file).stem.removeprefix("mmlu_")
            lines = data.read_text(encoding="utf-8").splitlines(keepends=True)
            data = folder / f"{subject}.jsonl"
            data.write_text("".join(line for line in lines if f'"{subject}"' in line))
        values = {
            "include": str(theirs / file),
            "task": f"own_{name}",
            "tag": None,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"validation": str(data)}},
            "training_split": None,
            "validation_split": "validation",
            "test_split": None,
            "fewshot_split": None,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
    return folder


@pytest.fixture(scope="module")
def theirs(
    tmp_path_factory: pytest.TempPathFactory, rows: Path, export: Path
) -> dict[str, list[dict[str, Any]]]:
    """What `lm_eval --model hf` says of each item of each task, in order."""
    folder = tmp_path_factory.mktemp("harness")
    definitions = write_definitions(folder / "definitions", rows)
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args"),
        f"pretrained={export},trust_remote_code=True,dtype=float32",
        *("--tasks", ",".join(f"own_{name}" for name in DEFINITIONS)),
        *("--include_path", str(definitions), "--device", "cpu", "--batch_size", "16"),
        *("--output_path", str(folder / "out"), "--log_samples"),
    ]
    offline = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, env=offline, text=True, capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = {}
    for name in DEFINITIONS:
        (file,) = (folder / "out").rglob(f"samples_own_{name}_*.jsonl")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        found[name] = sorted(samples, key=lambda sample: int(sample["doc_id"]))
    return found


def our_results(export: Path, rows: Path) -> dict[str, TaskResult]:
    model = load_scored_model(export, device="cpu")
    questions = [load_questions(find_tasks(name)[0], "lm_eval", str(rows)) for name in DEFINITIONS]
    suite = Suite(questions, model.encoder, positions=model.positions, batch_tokens=500)
    results = suite.results(suite.score(model.logits, model.device))
    return {result.task: result for result in results}


def test_an_item_is_asked_or_scored_in_another_way_than_by_the_harness(
    theirs: dict[str, list[dict[str, Any]]], rows: Path, export: Path
) -> None:
    ours = our_results(export, rows)
    assert ours.keys() == theirs.keys()
    for name, samples in theirs.items():
        result = ours[name]
        assert len(samples) == len(result.items), name
        for item, sample in zip(result.items, samples, strict=True):
            answers = [float(answer[0]) for answer in sample["filtered_resps"]]
            assert answers == pytest.approx(item.log_likelihoods, abs=TOLERANCE), (name, item.id)
            for metric in ("acc", "acc_norm"):
                if metric in sample:
                    assert item.score(metric) == sample[metric], (name, item.id, metric)  # type: ignore[arg-type]
        right = [sample["acc"] for sample in samples]
        mean = sum(right) / len(right)
        score = result.score("acc")
        assert score.value == pytest.approx(mean)
        # The harness's standard error: a sample's deviation over the root of its size.
        assert score.stderr == pytest.approx(math.sqrt(mean * (1 - mean) / (len(right) - 1)))
    assert len({name for name in ours if 0 < ours[name].score("acc").value < 1}) > 6
