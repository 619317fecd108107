"""The growth journal: what a crash leaves of it, what a resume makes of it, what it costs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from sgt_ds.config import GrowthConfig, ModelConfig
from sgt_ds.errors import UserError
from sgt_ds.growth import (
    DecisionLine,
    Entropy,
    EntropyAverage,
    Journal,
    Line,
    Measurement,
    State,
    build_policy,
    kept_part,
    read_journal,
)
from sgt_ds.growth.decision import freeze
from sgt_ds.growth.statistics import measurement_of
from sgt_ds.training.run_directory import kept_rows

LAYERS, HEADS = 3, 2
MODEL = ModelConfig(
    hidden_size=4, intermediate_size=1, num_layers=LAYERS, num_heads=HEADS, vocab_size=1
)
GROWTH = GrowthConfig(layers=1, heads=1, k_max=2, t_start=2, interval=2, entropy_ema=0.0)
HEADER = {
    "version": "0",
    "config_hash": "abc",
    "method": "sgt",
    "growth": GROWTH.model_dump(mode="json"),
    "model": MODEL.model_dump(mode="json"),
}


def measurement(step: int, *, layers: int = LAYERS, heads: int = HEADS) -> Measurement:
    values = np.random.default_rng(step).random((64, layers, heads))
    sums = np.stack([values.sum(0), (values**2).sum(0), np.full((layers, heads), 64.0)], axis=-1)
    return measurement_of(step, sums)


def write(path: Path, steps: int) -> None:
    """A journal as a run writes it, with a decision at every second step."""
    policy, state = build_policy("sgt", GROWTH, MODEL), State()
    with Journal.open_or_create(path, HEADER) as journal:
        for step in range(1, steps + 1):
            measured = measurement(step)
            journal.measure(measured)
            if policy.is_due(step, state):
                entropy = Entropy(measured.entropy, measured.stderr, measured.sequences)
                decision = policy.decide(step, entropy, state)
                state = decision.after
                journal.decision(decision, step * 100)


def read(path: Path) -> list[Line]:
    return list(read_journal(path)[1])


def text_of(lines: list[Line]) -> str:
    """Comparable although NaN equals nothing."""
    return repr(lines)


def test_torn_last_line_that_stays_or_takes_a_whole_one_with_it(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    write(whole, 4)
    content = whole.read_bytes()
    ends = [index + 1 for index, byte in enumerate(content) if byte == 10]
    for cut in range(ends[0] + 1, len(content) + 1, 7):
        path = tmp_path / "torn.jsonl"
        path.write_bytes(content[:cut])
        Journal.open_or_create(path, HEADER).close()
        kept = max(end for end in ends if end <= cut + 1)
        # A line that lacks nothing but its newline is whole.
        assert path.read_bytes() == content[:kept]
        assert text_of(read(path)) == text_of(read(whole)[: content[:kept].count(b"\n") - 1])


def test_resume_that_doubles_lines_or_loses_some(tmp_path: Path) -> None:
    straight, resumed = tmp_path / "straight.jsonl", tmp_path / "resumed.jsonl"
    write(straight, 9)
    write(resumed, 9)
    with resumed.open("ab") as stream:
        stream.write(b'{"type":"measure","step":10,"entr')
    for step in (6, 4, 0):
        with Journal.open_or_create(resumed, HEADER) as journal:
            journal.cut_back(step)
        steps = [
            line.decision.step if isinstance(line, DecisionLine) else line.step
            for line in read(resumed)
        ]
        assert steps == [s for s in (1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 9) if s <= step]
    write(resumed, 9)
    assert resumed.read_bytes() == straight.read_bytes()


def test_freeze_that_came_after_the_checkpoint_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "growth.jsonl"
    with Journal.open_or_create(path, HEADER) as journal:
        journal.measure(measurement(1))
        journal.decision(freeze(1, "operator: growth was frozen on request", State()), 5)
        before = path.read_bytes()
        journal.cut_back(1, frozen=True)
        assert path.read_bytes() == before
        journal.cut_back(1, frozen=False)
    assert [type(line) for line in read(path)] == [Measurement]


@pytest.mark.parametrize("damaged", ['{"step": "q"}', '{"step": null}', "[" * 100_000, "\0" * 99])
def test_a_damaged_line_ends_a_rollback_in_a_traceback_or_takes_good_ones_along(
    damaged: str, tmp_path: Path
) -> None:
    path = tmp_path / "growth.jsonl"
    good = ['{"type": "header"}', '{"type": "measure", "step": 5}']
    path.write_text("".join(f"{line}\n" for line in [*good, damaged]))
    whole = len("".join(f"{line}\n" for line in good))
    assert kept_part(path, 12) == (whole, False)  # as a power cut leaves it
    with path.open("a") as stream:
        stream.write('{"type": "measure", "step": 6}\n{"type": "measure", "step": 13}\n')
    assert kept_part(path, 5) == (whole, False)
    kept = path.read_text().index('{"type": "measure", "step": 13}')
    assert kept_part(path, 12) == (kept, False)


def test_a_damaged_row_of_metrics_takes_the_rows_after_it_along(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = ['{"step": 5}', '{"step": "x"}', '{"st', "[]", '{"step": 10}', '{"step": 10, "a": 1}']
    kept = "".join(f"{row}\n" for row in rows)
    path.write_text(kept + '{"step": 15}\n{"step": 2')
    assert kept_rows(path, 14) == len(kept)
    assert kept_rows(path, 15) == len(kept) + len('{"step": 15}\n')
    assert kept_rows(path, 4) == 0
    path.write_text(kept + '\0\0\0\n{"step": 2')  # what a power cut may leave
    assert kept_rows(path, 15) == len(kept)


def test_journal_of_another_run_that_is_written_into(tmp_path: Path) -> None:
    path = tmp_path / "growth.jsonl"
    write(path, 2)
    with pytest.raises(UserError, match="different configuration"):
        Journal.open_or_create(path, {**HEADER, "config_hash": "other"})
    with pytest.raises(UserError, match="holds a journal already"):
        Journal.create(path, HEADER)


def test_fork_that_does_not_replay_by_itself(tmp_path: Path) -> None:
    parent, child = tmp_path / "parent.jsonl", tmp_path / "child.jsonl"
    write(parent, 5)
    with Journal.create(child, HEADER) as journal:
        journal.adopt(parent, through=4)
    measured = [line for line in read(parent) if isinstance(line, Measurement)]
    adopted = [line for line in read(child) if isinstance(line, Measurement)]
    assert [line.adopted for line in adopted] == [True, True, True, False]
    assert text_of([replace(line, adopted=False) for line in adopted]) == text_of(measured[:4])


def test_long_run_that_fills_the_disk(tmp_path: Path) -> None:
    path, steps = tmp_path / "growth.jsonl", 50
    with Journal.create(path, HEADER) as journal:
        for step in range(1, steps + 1):
            journal.measure(measurement(step, layers=16, heads=16))
    assert path.stat().st_size * 5000 / steps < 40e6


def test_number_that_is_decided_from_but_not_written_down(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    mean = np.concatenate([rng.random(500), [0.0, 1.0, 1.0000006, -1e-9, 1e-30, np.nan, np.inf]])
    count = np.full(mean.shape, 3.0)
    sums = np.stack([mean * count, mean**2 * count, count], axis=-1)[None]
    measured = measurement_of(7, sums)
    with Journal.create(tmp_path / "growth.jsonl", {}) as journal:
        journal.measure(measured)
    line = json.loads((tmp_path / "growth.jsonl").read_text().splitlines()[1])
    written = line["entropy"][0]
    assert written[-2:] == [None, None]
    for value, kept, decided in zip(mean[:-2], written, measured.entropy[0], strict=False):
        assert decided == kept
        assert np.float32(kept) == np.float32(min(1.0, max(0.0, value)))
        assert repr(kept) == str(np.float32(kept)) or float(str(np.float32(kept))) == kept
        assert len(repr(kept)) <= 12


def test_standard_error_that_numpy_would_not_give() -> None:
    values = np.random.default_rng(1).random((20, 2, 3))
    sums = np.stack([values.sum(0), (values**2).sum(0), np.full((2, 3), 20.0)], axis=-1)
    measured = measurement_of(1, sums)
    expected = values.std(axis=0, ddof=1) / math.sqrt(20)
    assert np.allclose(measured.stderr, expected, rtol=5e-3)
    assert np.allclose(measured.entropy, values.mean(0), atol=1e-7)
    assert measured.sequences == 20
    one = measurement_of(1, np.array([[[0.5, 0.25, 1.0]]]))
    assert math.isnan(one.stderr[0][0])
    none = measurement_of(1, np.zeros((1, 1, 3)))
    assert math.isnan(none.entropy[0][0])


def test_one_nan_that_blinds_every_later_window() -> None:
    average = EntropyAverage(0.5)
    seen = [
        average.update(Measurement(step, ((value,),), ((math.nan,),), 1)).mean[0][0]
        for step, value in enumerate((0.8, 0.4, math.nan, 0.2))
    ]
    assert seen[:2] == [0.8, pytest.approx(0.6)]
    assert math.isnan(seen[2])
    assert seen[3] == pytest.approx(0.4)
    # What a checkpoint keeps, JSON in between, goes on with the same bits.
    other = EntropyAverage(0.5)
    other.load_state_dict(json.loads(json.dumps(average.state_dict())))
    following = Measurement(9, ((0.123,),), ((0.01,),), 1)
    assert repr(other.update(following)) == repr(average.update(following))


def test_compressed_journal_that_reads_otherwise(tmp_path: Path) -> None:
    path, packed = tmp_path / "growth.jsonl", tmp_path / "growth.jsonl.zst"
    write(path, 6)
    packed.write_bytes(zstandard.compress(path.read_bytes()))
    assert text_of(read(packed)) == text_of(read(path))
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(UserError, match="line 1"):
        read(packed)


def line(**values: Any) -> str:
    return json.dumps({"step": 1, "entropy": [[0.1, 0.2], [0.3, 0.4]], **values})


BAD = {
    "empty": ([], "is empty"),
    "not JSON": ([line(), "step 2"], "line 2: is not JSON"),
    "binary": (["\x00\x01"], "line 1: is not JSON"),
    "not a JSON object": (["[1]"], "line 1: is not a JSON object"),
    "foreign": (['{"loss": 3.1, "lr": 0.1}'], "line 1: step None"),
    "foreign type": ([line(), '{"type": "metric"}'], "line 2: type 'metric'"),
    "unsorted": ([line(step=2), line(step=1)], "line 2: step 1 comes after step 2"),
    "doubled": ([line(), line()], "line 2: step 1 comes after step 1"),
    "step of a float": ([line(step=1.5)], "line 1: step 1.5"),
    "above 1": ([line(entropy=[[0.1, 1.5]])], "line 1: entropy of layer 0, head 1 is 1.5"),
    "below 0": ([line(entropy=[[0.1], [-0.5]])], "line 1: entropy of layer 1, head 0 is -0.5"),
    "NaN": (['{"step": 1, "entropy": [[NaN, 0.5]]}'], "line 1: is not JSON (NaN is not valid JSON"),
    "overflow": (['{"step": 1, "entropy": [[1e400, 0.5]]}'], "line 1: entropy of layer 0, head 0"),
    "text": ([line(entropy=[["high"]])], "line 1: entropy of layer 0, head 0 is 'high'"),
    "ragged": ([line(entropy=[[0.1], [0.1, 0.2]])], "line 1: entropy must have the same number"),
    "flat": ([line(entropy=[0.1, 0.2])], "line 1: entropy must be a list of layers"),
    "other shape": ([line(), line(step=2, entropy=[[0.1, 0.2]])], "line 2: has 1 layers"),
    "deep": (["[" * 100_000], "line 1: is nested too deeply"),
    "other format": (['{"type": "header", "format": 9}'], "line 1: format 9"),
    "no model": (['{"type": "header", "format": 1, "method": "sgt"}'], "line 1: the header lacks"),
    "second header": ([line(), '{"type": "header"}'], "line 2: a second header"),
    "half a decision": ([line(), '{"type": "decision", "step": 2}'], "line 2: the decision lacks"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_journal_that_is_read(fault: str, tmp_path: Path) -> None:
    lines, message = BAD[fault]
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(f"{text}\n" for text in lines))
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("key", "wrong"), [("loops", {}), ("growing_layer", 1)])
def test_a_decision_that_tells_of_other_loops_than_its_state(
    key: str, wrong: Any, tmp_path: Path
) -> None:
    path = tmp_path / "growth.jsonl"
    write(path, 3)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    number = next(n for n, values in enumerate(lines) if values.get("loops"))
    lines[number][key] = wrong
    path.write_text("".join(json.dumps(values) + "\n" for values in lines))
    with pytest.raises(
        UserError, match=f"line {number + 1}: is not a valid decision .its {key} .* should"
    ):
        read(path)


def test_cut_off_line_that_passes_or_stops_a_look_at_a_live_run(tmp_path: Path) -> None:
    path = tmp_path / "growth.jsonl"
    write(path, 3)
    whole = read(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="line 5: is truncated"):
        read(path)
    assert text_of(list(read_journal(path, live=True)[1])) == text_of(whole[:-1])
