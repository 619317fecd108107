"""`sgt-ds growth`: replays by hand-worked cases, bad input in one line, and a seventh method."""

from __future__ import annotations

import difflib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runs
from pydantic import ValidationError

import sgt_ds
from sgt_ds.cli import main
from sgt_ds.config import FromJournal, GrowthConfig, ModelConfig, RunConfig, RunLayout
from sgt_ds.errors import UserError
from sgt_ds.growth import (
    POLICIES,
    Entropy,
    Journal,
    Measurement,
    Policy,
    build_policy,
    settled_growth,
)

PAPER = ["--k-max", "2", "--layers", "2", "--heads", "1", "--t-start", "100", "--interval", "100"]
# Three layers of which the first is excluded; means 0.9, 0.55, 0.75, and layer 3 in between.
CALM = [[0.9, 0.9], [0.5, 0.6], [0.8, 0.7], [0.6, 0.7]]
DROPPED = [[0.9, 0.9], [0.5, 0.6], [0.8, 0.7], [0.1, 0.7]]


def plain(path: Path, *steps: tuple[int, Any]) -> Path:
    path.write_text("".join(json.dumps({"step": s, "entropy": e}) + "\n" for s, e in steps))
    return path


def replayed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[dict[str, Any]]:
    assert main(["growth", "replay", *map(str, arguments), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line on stderr with which a command ends, with status 2."""
    try:
        status = main(["growth", *map(str, arguments)])
    except SystemExit as error:
        status = int(str(error.code))
    captured = capsys.readouterr()
    assert status == 2
    assert captured.err.count("\n") == 1
    return captured.err


def test_replay_that_departs_from_a_case_worked_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = plain(
        tmp_path / "e.jsonl",
        (99, DROPPED),  # no window
        (100, CALM),  # C = {3, 2}: the deeper, and its head 1
        (200, CALM),  # deepened to K_max
        (300, DROPPED),  # C = {2, 1}: 3 is complete, the next below it
        (400, [[0.9, 0.9], [0.5, None], [0.8, 0.7], [0.1, 0.7]]),  # not finite: nothing
        (500, [[0.9, 0.9], [0.9, 0.9], [0.2, 0.1], [0.8, 0.7]]),  # 2 is no candidate: nothing
        (600, CALM),
    )
    three, two = {"depth": 2, "heads": [1]}, {"depth": 1, "heads": [0]}
    assert replayed(capsys, file, *PAPER) == [
        {
            "step": 100,
            "phase": "growing",
            "growing_layer": 3,
            "loops": {"3": {**three, "depth": 1}},
        },
        {"step": 200, "phase": "growing", "growing_layer": 3, "loops": {"3": three}},
        {"step": 300, "phase": "growing", "growing_layer": 2, "loops": {"2": two, "3": three}},
        {
            "step": 600,
            "phase": "fixed",
            "growing_layer": 2,
            "loops": {"2": {**two, "depth": 2}, "3": three},
        },
    ]
    frozen = replayed(capsys, file, *PAPER, "--freeze-at", "300")
    assert [change["step"] for change in frozen] == [100, 200]
    mirrored = replayed(capsys, file, *PAPER, "--direction", "s2d", "--exclude-layers", "0", "1")
    assert [change["growing_layer"] for change in mirrored] == [2, 2, 3, 3]
    everything = replayed(
        capsys, file, *runs.with_defaults(PAPER, "--exclude-layers", "--layers", "1")
    )
    assert [change["growing_layer"] for change in everything] == [0, 0]
    # Half of the past counts: at 100 layer 3 has (0.4 + 0.65) / 2 = 0.525, layer 1 has 0.55; at
    # 500 layer 2 has 0.45, layer 1 (0.25 + 0.45, 0.3 + 0.45) and layer 3 about 0.6.
    averaged = replayed(capsys, file, *PAPER, "--ema", "0.5")
    grown = [(change["step"], change["growing_layer"]) for change in averaged]
    assert grown == [(100, 2), (200, 2), (300, 1), (500, 1)]
    listed = ("--layers", "1,3", "--t-start", "100", "--interval", "100", "--stages", "1")
    for method, head in (("high_entropy_loop", 1), ("low_entropy_loop", 0)):
        (change,) = replayed(capsys, file, "--method", method, *listed)
        assert [loop["heads"] for loop in change["loops"].values()] == [[head], [head]]


def test_own_journal_that_needs_flags_or_ignores_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = own_journal(tmp_path / "run", GROWTH)
    own = replayed(capsys, journal)
    assert [change["step"] for change in own] == [10, 20, 30, 40]
    shallower = replayed(capsys, journal.parent, "--k-max", "1")
    assert [change["step"] for change in shallower] == [10, 20]


BAD_USE = {
    "more layers than are eligible": (["--layers", "4"], "--layers: 4 exceeds the 3 eligible"),
    "more heads than there are": (["--heads", "3"], "--heads: 3 exceeds the model's 2"),
    "no loop": (["--k-max", "0"], "argument --k-max: '0' is not a whole number from 1"),
    "excluded layer that is none": (["--exclude-layers", "9"], "--exclude-layers: layer 9"),
    "average of the past alone": (["--ema", "1"], "--entropy-ema: "),
    "unknown method": (["--method", "stg"], "--method: 'stg' is unknown; did you mean 'sgt'"),
    "no use": (
        ["--loops", "3"],
        "--loops: does nothing under method sgt; leave it out, or use it with b",
    ),
    "no growth": (["--method", "vanilla"], "--heads: does nothing under method vanilla; "),
    "no number": (["--interval", "often"], "argument --interval: 'often' is not a whole number"),
}


@pytest.mark.parametrize("fault", BAD_USE)
def test_bad_setting_that_ends_in_a_traceback(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, message = BAD_USE[fault]
    file = plain(tmp_path / "e.jsonl", (1, CALM))
    assert message in refused(capsys, "replay", file, *runs.with_defaults(PAPER, *flags))


def test_missing_settings_or_files_that_end_in_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = plain(tmp_path / "e.jsonl", (1, CALM), (1, CALM))
    assert "--k-max: is needed" in refused(capsys, "replay", file)
    assert f"{file}: line 2: step 1 comes after" in refused(capsys, "replay", file, *PAPER)
    assert "no such journal" in refused(capsys, "replay", tmp_path / "none.jsonl")
    assert "holds no growth.jsonl" in refused(capsys, "show", tmp_path)
    assert "is not a journal header" in refused(capsys, "show", file)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 5, "loss": 7.4}\n')
    assert "it is not a journal line; a run's journal is its growth.jsonl" in refused(
        capsys, "replay", metrics
    )
    assert "is not a run directory" in refused(capsys, "freeze", file)


GROWTH = GrowthConfig(k_max=2, layers=2, heads=1, t_start=10, interval=10)
SHAPE = ModelConfig(hidden_size=4, intermediate_size=8, num_layers=4, num_heads=2, vocab_size=10)


def own_journal(
    run: Path,
    growth: GrowthConfig,
    *,
    seed: int = 0,
    rows: list[list[float]] = CALM,
    error: float = 0.01,
) -> Path:
    """A journal as a run of 60 steps writes it: `rows` and a little noise at every step."""
    run.mkdir()
    policy = build_policy("sgt", growth, SHAPE)
    state, noise = policy.initial_state(), random.Random(seed)
    header = {
        "method": "sgt",
        "growth": growth.model_dump(mode="json"),
        "model": SHAPE.model_dump(mode="json"),
        "sequence_length": 8,
        "global_batch_size": 2,
    }
    with Journal.create(run / "growth.jsonl", header) as journal:
        for step in range(1, 61):
            measured = tuple(
                tuple(value + noise.randrange(100) / 1e5 for value in row) for row in rows
            )
            errors = ((error, error),) * 4
            journal.measure(Measurement(step, measured, errors, 16))
            if policy.is_due(step, state):
                decision = policy.decide(step, Entropy(measured, errors, 16), state)
                state = decision.after
                journal.decision(decision, step)
    return run / "growth.jsonl"


def test_table_that_hides_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own_journal(tmp_path / "run", GROWTH)
    assert main(["growth", "show", str(tmp_path / "run")]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert "phase fixed" in rows[0]
    assert rows[2].split()[:5] == ["10", "activate", "3", "1", "1"]
    assert "starts to loop" in rows[2]
    # Layer 3 was taken before 1 by 0.1 with errors of 0.01: 7 standard errors; no choice is close.
    assert rows[2].split()[5:9] == ["l", "7.1", "h", "7.1"]
    assert not any("within noise" in row for row in rows)
    own_journal(tmp_path / "noisy", GROWTH, error=0.1)
    assert main(["growth", "show", str(tmp_path / "noisy")]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert "l 0.7 h 0.7" in rows[2]
    assert "; within noise" in rows[2]
    assert rows[-1] == "within noise (a margin below 2): 10, 20, 30, 40"
    assert main(["growth", "show", str(tmp_path / "run"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [taken["step"] for taken in document["decisions"]] == [10, 20, 30, 40]
    assert document["loops"]["3"] == {"depth": 2, "heads": [1]}
    # The same columns under the same words wherever they stand.
    for command, tables in (("replay", 1), ("what-if", 2)):
        assert main(["growth", command, str(tmp_path / "run")]) == 0
        assert capsys.readouterr().out.splitlines().count(rows[1]) == tables


def test_a_journal_without_its_beginning_passes_for_a_whole_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = own_journal(tmp_path / "run", GROWTH)
    header, *lines = file.read_text().splitlines(keepends=True)
    cut = next(place for place, line in enumerate(lines) if '"deepen"' in line)
    file.write_text("".join([header, *lines[cut - 5 :]]))
    told = f"sgt-ds: {file}: step 16: lines before it are missing"
    for verb in ("replay", "what-if"):
        assert main(["growth", verb, str(tmp_path / "run"), "--json"]) == 2
        said = capsys.readouterr()
        assert told in said.err
        assert not said.out
    assert main(["growth", "show", str(tmp_path / "run")]) == 0
    assert "\nlines before step 16 are missing" in capsys.readouterr().out
    # Or without one in between: the growth that is derived from the others would be another.
    for lost in ('"measure","step":20,', '"decision","step":20,', '"measure","step":17,'):
        file.write_text("".join([header, *(line for line in lines if lost not in line)]))
        assert main(["growth", "what-if", str(tmp_path / "run"), "--k-max", "1"]) == 2
        assert f"{file}: step " in capsys.readouterr().err
    file.write_text("".join([header, *lines]))
    assert main(["growth", "what-if", str(tmp_path / "run"), "--k-max", "1"]) == 0


def test_estimate_that_passes_for_a_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_journal(tmp_path / "run", GROWTH)
    arguments = ["growth", "what-if", str(tmp_path / "run"), "--k-max", "1", "--entry", "none"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("ESTIMATE")
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["estimate"] is True
    own, other = document["this_run"], document["what_if"]
    assert [len(found["changes"]) for found in (own, other)] == [4, 2]
    # By hand: 60 updates of 16 tokens; one head's pass costs 24·4·2 + 12·8·2 = 384 a token.
    # The other policy: layer 3 from update 10, layer 2 from 20, one pass of one head each.
    vanilla = other["total_flops"] - 16 * 384 * (50 + 40)
    # The run: each layer's first window computes both heads, then its head passes twice.
    loops = 10 * 2 + 40 * 2 + 10 * 2 + 20 * 2
    assert own["total_flops"] == vanilla + 16 * 384 * loops
    # Loops that are there from the start are no changes, and not nothing.
    block = ["growth", "what-if", str(tmp_path / "run"), "--method", "block_loop"]
    assert main([*block, "--layers", "1,2"]) == 0
    text = capsys.readouterr().out
    assert "2 looping layers from the start\n  layer 1  depth 1  heads block\n" in text
    assert main([*block, "--layers", "1"]) == 2
    assert "takes a list of layers, e.g. 1,7 or 1," in capsys.readouterr().err


def test_growth_of_a_vanilla_run_that_begins_after_its_end_is_no_change_without_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = own_journal(tmp_path / "run", GROWTH)
    header, *lines = file.read_text().splitlines()
    plain = {**json.loads(header), "method": "vanilla", "growth": GrowthConfig().model_dump()}
    measured = [line for line in lines if '"measure"' in line]
    file.write_text("".join(f"{line}\n" for line in (json.dumps(plain), *measured)))
    sgt = ["growth", "what-if", str(file), "--method", "sgt", "--layers", "2", "--heads", "1"]
    assert main([*sgt, "--k-max", "1"]) == 0
    late = capsys.readouterr().out.splitlines()
    assert "0 changes" in late[-2]
    assert late[-1].startswith("nothing is decided before update 250 (t_start), and the journal")
    assert main([*sgt, "--k-max", "1", "--t-start", "10", "--interval", "10"]) == 0
    assert "overhead 0.00%, 0 changes\nwhat if: " in (text := capsys.readouterr().out)
    assert "2 changes" in text
    assert "nothing is decided" not in text
    assert main(["growth", "what-if", str(file)]) == 0
    assert "nothing is decided" not in capsys.readouterr().out


def test_parting_of_two_runs_that_is_blamed_on_the_wrong_thing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = own_journal(tmp_path / "first", GROWTH)
    own_journal(tmp_path / "again", GROWTH)
    own_journal(tmp_path / "noisy", GROWTH, seed=1)
    own_journal(tmp_path / "deeper", GROWTH.model_copy(update={"k_max": 3}), seed=1)
    dropped = [row if layer != 3 else DROPPED[3] for layer, row in enumerate(CALM)]
    own_journal(tmp_path / "other", GROWTH, rows=dropped)

    def divergence(other: str) -> tuple[int | None, str | None, int | None]:
        assert main(["growth", "diff", str(first), str(tmp_path / other), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["step"], found["cause"], found["statistics_step"]

    assert divergence("again") == (None, None, None)
    assert divergence("noisy") == (None, None, 1)
    assert divergence("deeper") == (30, "config", 1)
    assert divergence("other") == (10, "statistics", 1)
    (tmp_path / "fork").mkdir()
    lines = [json.loads(line) for line in first.read_text().splitlines()]
    adopted = [
        {**line, "adopted": True} if line.get("step", 20) < 20 else line
        for line in lines
        if line["type"] != "decision"
    ]
    text = "".join(json.dumps(line) + "\n" for line in adopted)
    (tmp_path / "fork" / "growth.jsonl").write_text(text)
    assert divergence("fork") == (10, "fork", None)


def test_freeze_request_that_nobody_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = GROWTH.model_copy(update={"t_start": 50})
    run = own_journal(tmp_path / "run", later).parent
    requests = RunLayout(run)
    assert not requests.freeze_request.exists()
    assert main(["growth", "freeze", str(run)]) == 0
    assert requests.freeze_request.exists()
    ended = own_journal(tmp_path / "ended", GROWTH).parent
    told = f"sgt-ds: {ended}: its growth has ended (phase fixed); there is nothing to freeze\n"
    assert refused(capsys, "freeze", ended) == told
    assert not RunLayout(ended).freeze_request.exists()


def test_method_that_lacks_a_part_of_a_policy() -> None:
    for method in POLICIES:
        layers = 2 if method in ("sgt", "vanilla") else [1]
        policy = build_policy(method, GrowthConfig(layers=layers), SHAPE)
        assert isinstance(policy, Policy)
        assert policy.initial_state() == policy.initial_state()


def test_layers_of_another_journal_that_are_not_its_highest(tmp_path: Path) -> None:
    journal = own_journal(tmp_path / "run", GROWTH)

    def layers(step: int, top: int, exclude: list[int]) -> list[int]:
        source = {"from_journal": str(journal), "step": step, "top": top}
        growth = GrowthConfig.model_validate({"layers": source, "exclude_layers": exclude})
        return list(build_policy("block_loop", growth, SHAPE).initial_state().loops)

    assert layers(25, 2, [0]) == [2, 3]
    assert layers(25, 2, []) == [0, 2]
    assert layers(1, 1, [0, 2]) == [3]
    with pytest.raises(UserError, match="step 61 was not measured"):
        layers(61, 1, [0])


def test_layers_chosen_for_another_step_are_kept_silently(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = own_journal(tmp_path / "other", GROWTH)
    source = {"from_journal": str(journal), "step": 25, "top": 2, "chosen": [1, 3]}
    values = {
        **{"model": SHAPE.model_dump(), "method": "block_loop", "growth": {"layers": source}},
        **{"data": {"train": [{"path": "shards"}]}, "deepspeed": "ds.json", "run_dir": "runs/r"},
    }
    own = tmp_path / "run" / "growth.jsonl"
    with pytest.raises(UserError, match=r"growth\.layers\.chosen: \[1, 3\] differs from \[2, 3\]"):
        settled_growth(RunConfig.model_validate(values), own)
    del source["chosen"]
    settled = settled_growth(RunConfig.model_validate(values), own)
    assert isinstance(settled.layers, FromJournal)
    assert settled.layers.chosen == [2, 3]
    # The journal goes, first as a file, then out of a folder that stays.
    source["chosen"] = [2, 3]
    for place in (journal, journal.parent):
        source["from_journal"] = str(place)
        journal.unlink(missing_ok=True)
        settled = settled_growth(RunConfig.model_validate(values), own)
        assert isinstance(settled.layers, FromJournal)
        assert settled.layers.chosen == [2, 3]
        assert f"{place} is gone" in caplog.messages[-1]
        assert "step 25" in caplog.messages[-1]
    del source["chosen"]
    source["step"] = 30
    lost = rf"growth\.layers\.from_journal: there is no journal at {journal.parent} .* step 30"
    with pytest.raises(UserError, match=f"{lost}.*as a list"):
        settled_growth(RunConfig.model_validate(values), own)
    own_journal(own.parent, GROWTH)
    with pytest.raises(UserError, match=f"{lost}.*this run began with"):
        settled_growth(RunConfig.model_validate(values), own)
    for wrong in ([2], [2, 2], [2, 9]):
        source["chosen"] = wrong
        with pytest.raises(ValidationError, match=r"growth\.layers\.chosen"):
            RunConfig.model_validate(values)


TOY = '''"""Method `toy`: the named layers, one more each window, all heads."""

from sgt_ds.growth.clock import DecisionClock
from sgt_ds.growth.decision import Decision
from sgt_ds.growth.layers import given_layers
from sgt_ds.growth.state import VANILLA, Loop


class Toy:
    entry = "none"

    def __init__(self, growth, model):
        self._clock, self._layers = DecisionClock.of(growth), given_layers(growth, model)
        self._heads = tuple(range(model.num_heads))

    def initial_state(self):
        return VANILLA

    def is_due(self, step, state):
        return len(state.loops) < len(self._layers) and self._clock.is_due(step)

    def phase(self, step, state):
        return self._clock.phase(step, len(state.loops) == len(self._layers))

    def decide(self, step, entropy, state):
        layer = self._layers[len(state.loops)]
        after = state.with_loop(layer, Loop(1, self._heads, "attention", step, step), layer)
        phase = self.phase(step, after)
        return Decision(step, "activate", "its turn", (layer,), None, state, after, phase)
'''
LINE = '        "toy": "toy.Toy",\n'


def test_seventh_method_that_takes_more_than_a_file_and_a_line(tmp_path: Path) -> None:
    package = Path(sgt_ds.__file__).parent
    shutil.copytree(package, tmp_path / "sgt_ds", ignore=shutil.ignore_patterns("__pycache__"))
    registry = tmp_path / "sgt_ds" / "growth" / "policy.py"
    before = registry.read_text()
    registry.write_text(before.replace('        "sgt": ', LINE + '        "sgt": '))
    (registry.parent / "toy.py").write_text(TOY)
    changed = [
        line
        for line in difflib.unified_diff(
            before.splitlines(), registry.read_text().splitlines(), lineterm="", n=0
        )
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert changed == [f"+{LINE.rstrip()}"]
    page = (package.parent / "docs" / "growth.md").read_text()
    for text in (LINE, TOY):  # the page shows this very diff
        assert "".join(f"+{line}".rstrip() + "\n" for line in text.splitlines()) in page
    file = plain(tmp_path / "e.jsonl", *((step, CALM) for step in range(1, 9)))
    flags = ["--method", "toy", "--layers", "1,3", "--t-start", "2", "--interval", "3", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "sgt_ds", "growth", "replay", str(file), *flags],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    changes = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(change["step"], change["phase"], list(change["loops"])) for change in changes] == [
        (2, "growing", ["1"]),
        (5, "fixed", ["1", "3"]),
    ]
