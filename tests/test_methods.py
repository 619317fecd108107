"""Every method trained, resumed, exported and reloaded; growth at the edges of its windows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from methods_run import probe

from sgt_ds.config import load_run_config
from sgt_ds.growth import build_policy, settled_growth
from sgt_ds.inference import convert

pytestmark = pytest.mark.launcher

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 4,
    "num_heads": 4,
    "vocab_size": runs.VOCABULARY,
    "init_std": 0.2,  # so that loops weigh in the logits
}
STEPS, START, WINDOW, STOP = 60, 24, 8, 28  # stopped in the middle of the first entry window
GROWTH = {"t_start": START, "interval": WINDOW, "k_max": 2, "layers": 2, "heads": 2}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "vanilla": ("vanilla", {}),
    # Its layers come from the vanilla run's journal, which is gone when it is resumed.
    "block_loop": ("block_loop", {}),
    "attention_loop": ("attention_loop", {"layers": [1, 3], "loops": 2}),
    "high_entropy_loop": ("high_entropy_loop", {"layers": [2], "stages": [3, 2]}),
    "low_entropy_loop": ("low_entropy_loop", {"layers": [2], "stages": [3, 2]}),
    "high_entropy_loop, ramp": (
        "high_entropy_loop",
        {"layers": [2], "stages": [3, 2], "loops": 2, "entry": "ramp"},
    ),
    "sgt, decay": ("sgt", {"entry": "decay"}),
    "sgt, ramp": ("sgt", {"entry": "ramp"}),
}
# Windows at 4, 8 and 12, the last update; every layer that may loop will, so each one grows.
SHORT = {"t_start": 4, "interval": 4, "k_max": 3, "layers": 3, "heads": 2}
EDGES: dict[str, dict[str, Any]] = {
    f"{entry}, {name}": {"entry": entry, **case}
    for entry in ("decay", "ramp")
    for name, case in (
        ("straight", {}),
        ("resumed", {"stops": [4, 6, 8]}),  # at a window, in the middle of an entry, at the next
        ("skipped", {"skip": 8}),
    )
}

RELOAD = """
import sys
sys.modules["sgt_ds"] = None
import torch
from transformers import AutoModelForCausalLM
ids = torch.load(sys.argv[1])
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        torch.save({"logits": model(ids).logits, "type": model.config.model_type}, folder + ".answer")
"""


def place(folder: Path, name: str) -> Path:
    """Run directory of a case."""
    return folder / name.replace(", ", "-")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs, trained one after another by the same two ranks under the launcher."""
    folder = tmp_path_factory.mktemp("methods")
    data = runs.write_data(folder / "data")
    source = folder / "source.jsonl"
    source.symlink_to(place(folder, "vanilla") / "growth.jsonl")

    def written(name: str, method: str, growth: dict[str, Any], steps: int, **case: Any) -> Any:
        run = runs.write_run(
            place(folder, name).with_suffix(".yaml"),
            data,
            method=method,
            growth=growth,
            data={"sequence_length": 32, "validation": None},
            training={"steps": steps, "global_batch_size": 4, "micro_batch_size": 2},
            telemetry={"enabled": False},
            checkpoint={"every": 1000},
            model=SHAPE,
            preset=None,
        )
        return {"run": str(run), **case}

    cases = []
    for name, (method, own) in METHODS.items():
        case: dict[str, Any] = {"stops": [STOP]}
        if name == "block_loop":
            own = {"layers": {"from_journal": str(source), "step": START, "top": 2}}
            case["lose"] = str(source)
        cases.append(written(name, method, {**GROWTH, **own}, STEPS, **case))
    for name, edge in EDGES.items():
        case = {key: value for key, value in edge.items() if key != "entry"}
        cases.append(written(name, "sgt", {**SHORT, "entry": edge["entry"]}, 12, **case))
    (folder / "cases.json").write_text(json.dumps(cases))
    command = runs.launcher(folder / "cases.json", 2)
    script = Path(__file__).with_name("methods_run.py")
    command[command.index("--module") : command.index("sgt_ds.train") + 1] = [str(script)]
    runs.run_to_end(command, timeout=500)
    return folder


@pytest.fixture(scope="module")
def reloaded(trained: Path) -> Path:
    """Every method's export, and what a process without this package computes with it."""
    torch.save(probe(), trained / "ids.pt")
    exports = []
    for name in METHODS:
        exports.append(str(trained / f"export-{place(trained, name).name}"))
        convert(place(trained, name), Path(exports[-1]), dtype="fp32")
    subprocess.run(
        [sys.executable, "-c", RELOAD, str(trained / "ids.pt"), *exports],
        env={**os.environ, "HF_HOME": str(trained / "home"), "HF_HUB_OFFLINE": "1"},
        cwd=trained,
        check=True,
        timeout=120,
    )
    return trained


def loops(run: Path) -> list[tuple[int, str, dict[str, Any]]]:
    return [
        (line["step"], line["rule"], line["loops"])
        for line in runs.journal_lines(run)
        if line["type"] == "decision"
    ]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_does_not_survive_resume_export_and_reload(name: str, reloaded: Path) -> None:
    run = place(reloaded, name)
    assert sorted(runs.losses(run)) == list(range(1, STEPS + 1))
    rules = runs.check_replay(run)
    if METHODS[name][0] in ("vanilla", "block_loop", "attention_loop"):
        assert rules == []
    elif METHODS[name][0] == "sgt":
        assert rules[0] == "activate"
        assert len(rules) >= 2
    else:
        assert rules == ["activate", "freeze"]
    answer = torch.load(reloaded / f"export-{run.name}.answer")
    assert answer["type"] == ("llama" if name == "vanilla" else "sgt")
    expected = torch.load(run.with_suffix(".logits"))[..., : answer["logits"].shape[-1]]
    scale = expected.abs().max()
    assert scale > 1
    assert (answer["logits"] - expected).abs().max() <= 1e-5 * scale


def test_a_method_that_changes_anything_before_it_grows(trained: Path) -> None:
    """Same weights, same data, same losses to the last bit until the first loop."""
    reference = runs.losses(place(trained, "vanilla"))
    for name in METHODS:
        losses = runs.losses(place(trained, name))
        same = [step for step in losses if losses[step] == reference[step]]
        grows_late = METHODS[name][0] not in ("block_loop", "attention_loop")
        assert (set(range(1, START + 1)) <= set(same)) == grows_late, name
        assert (losses[STEPS] == reference[STEPS]) == (name == "vanilla")


def test_layers_from_a_journal_that_are_not_its_highest_or_are_lost(trained: Path) -> None:
    vanilla = [x for x in runs.journal_lines(place(trained, "vanilla")) if x["step"] <= START]
    averages = [0.0] * SHAPE["num_layers"]  # type: ignore[operator, list-item]
    for line in vanilla:
        for layer, heads in enumerate(line["entropy"]):
            mean = sum(heads) / len(heads)
            averages[layer] = mean if line is vanilla[0] else (averages[layer] + mean) / 2
    highest = sorted(range(1, 4), key=lambda layer: -averages[layer])[:2]
    run = place(trained, "block_loop")
    header = json.loads((run / "growth.jsonl").read_text().splitlines()[0])
    assert not (trained / "source.jsonl").is_symlink()
    assert header["growth"]["layers"] == sorted(highest)
    # What it saved stands by itself, for a plan as for a run whose journal is lost as well.
    saved = load_run_config(run / "run.yaml")
    assert build_policy("block_loop", saved.growth, saved.model).initial_state().loops.keys() == {
        *highest
    }
    assert settled_growth(saved, trained / "lost.jsonl") == saved.growth
    config = json.loads((run.parent / "block_loop" / "checkpoints" / latest(run)).read_text())
    assert sorted(map(int, config["state"]["loops"])) == sorted(highest)


def latest(run: Path) -> str:
    return f"{(run / 'checkpoints' / 'latest').read_text().strip()}/state.json"


@pytest.mark.parametrize("entry", ["decay", "ramp"])
def test_a_resume_at_a_window_or_inside_an_entry_that_trains_otherwise(
    entry: str, trained: Path
) -> None:
    straight, resumed = (place(trained, f"{entry}, {name}") for name in ("straight", "resumed"))
    assert runs.losses(resumed) == runs.losses(straight)
    assert runs.journal_lines(resumed) == runs.journal_lines(straight)
    assert [(step, rule) for step, rule, _ in loops(straight)] == [
        *((4, "activate"), (8, "deepen"), (12, "deepen"))
    ]
    same = torch.load(resumed.with_suffix(".logits")) == torch.load(straight.with_suffix(".logits"))
    assert same.all()


@pytest.mark.parametrize("entry", ["decay", "ramp"])
def test_a_window_on_the_last_step_that_is_lost_or_counted(entry: str, trained: Path) -> None:
    run = place(trained, f"{entry}, straight")
    runs.check_replay(run)  # Θ of the last checkpoint is that of the decision at 12
    state = json.loads((run / "checkpoints" / latest(run)).read_text())
    assert state["step"] == 12
    assert [loop["depth"] for loop in state["state"]["loops"].values()] == [3]
    # It acts in no update of this run: no FLOP of it was spent.
    per_update = {row["step"]: row["flops"] for row in runs.metrics(run) if "flops" in row}
    assert per_update[12] - per_update[11] == per_update[11] - per_update[10]


@pytest.mark.parametrize("entry", ["decay", "ramp"])
def test_a_skipped_update_at_a_window_that_skips_or_doubles_it(entry: str, trained: Path) -> None:
    run = place(trained, f"{entry}, skipped")
    straight = place(trained, f"{entry}, straight")
    steps = [x["step"] for x in runs.journal_lines(run) if x["type"] == "measure"]
    assert steps == list(range(1, 13))
    assert [step for step, _, _ in loops(run)] == [4, 8, 12]
    runs.check_replay(run)
    # The batch of the skipped update is consumed, so the 8th applied one has other entropies.
    tokens = {row["step"]: row["tokens"] for row in runs.metrics(run) if "tokens" in row}
    assert tokens[8] - tokens[7] == 2 * (tokens[7] - tokens[6])
    own, other = ({x["step"]: x for x in runs.journal_lines(r)} for r in (run, straight))
    assert own[7] == other[7]
    assert own[9] != other[9]


@pytest.mark.parametrize("name", [*METHODS, *EDGES])
def test_growth_that_touches_parameters_optimizer_or_buffers(name: str, trained: Path) -> None:
    for rank in range(2):
        path = place(trained, name).with_suffix(f".seen{rank}")
        seen = json.loads(path.read_text())
        assert seen["touched"] == []
        if name not in ("vanilla", "block_loop", "attention_loop"):
            assert seen["growths"] >= 2
            # 6 parameters a block and 3 more, two groups of two buffers, moments and step.
            assert seen["things"] == 6 * 4 + 3 + 2 * 2 + 2 * (1 + 3)
