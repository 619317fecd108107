"""The growth controller on real gloo processes: the split over ranks must not show."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sgt_ds.config import PRESETS, GrowthConfig
from sgt_ds.errors import StateMismatch
from sgt_ds.growth import (
    DecisionLine,
    GrowthController,
    Journal,
    Loop,
    Measurement,
    State,
    build_policy,
    decisions,
    read_journal,
)

MODEL = PRESETS["tiny"]
LAYERS, HEADS, SEQUENCES, STEPS = MODEL.num_layers, MODEL.num_heads, 16, 24
GROWTH = GrowthConfig(k_max=2, layers=3, heads=2, t_start=4, interval=3)
SPLITS = [(ranks, pieces) for ranks in (1, 2, 4) for pieces in (1, 2, 4)]


def entropies(step: int) -> torch.Tensor:
    """Of every sequence of the global batch: float32 (sequences, layers, heads), in [0, 1]."""
    generator = torch.Generator().manual_seed(step)
    level = torch.rand(LAYERS, HEADS, generator=torch.Generator().manual_seed(step // 5))
    return 0.8 * level + 0.2 * torch.rand(SEQUENCES, LAYERS, HEADS, generator=generator)


def sums(values: torch.Tensor, pieces: int) -> torch.Tensor:
    """Totals of one rank as the trainer makes them: float32 a micro-batch, float64 over them."""
    total = torch.zeros(LAYERS, HEADS, 3, dtype=torch.float64)
    for piece in values.chunk(pieces):
        count = torch.full((LAYERS, HEADS), float(len(piece)))
        total += torch.stack([piece.sum(0), (piece * piece).sum(0), count], dim=-1)
    return total


def controller(
    journal: Journal | None = None, group: Any = None, growth: GrowthConfig = GROWTH
) -> GrowthController:
    policy = build_policy("sgt", growth, MODEL)
    return GrowthController(policy, growth, MODEL, journal=journal, group=group, device="cpu")


def header(growth: GrowthConfig = GROWTH) -> dict[str, Any]:
    return {
        "method": "sgt",
        "growth": growth.model_dump(mode="json"),
        "model": MODEL.model_dump(mode="json"),
    }


def train(
    grown: GrowthController, steps: range, rank: int = 0, ranks: int = 1, pieces: int = 1
) -> list[str]:
    """Θ's hash after each step."""
    hashes = []
    for step in steps:
        own = entropies(step).chunk(ranks)[rank]
        grown.observe(step, sums(own, pieces))
        grown.decide(step, flops=step)
        hashes.append(grown.state.digest())
    grown.flush()
    return hashes


def on_each_rank(rank: int, ranks: int, directory: str) -> None:
    """What the spawned process does: every accumulation split, then three ranks gone astray."""
    folder = Path(directory)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks
    )
    group = dist.new_group(backend="gloo")
    for pieces in (1, 2, 4):
        path = folder / f"split-{ranks}-{pieces}.jsonl"
        journal = Journal.create(path, header()) if rank == 0 else None
        grown = controller(journal, group)
        hashes = train(grown, range(1, STEPS + 1), rank, ranks, pieces)
        Path(folder / f"hashes-{ranks}-{pieces}-{rank}.json").write_text(json.dumps(hashes))
    complete = State({5: Loop(9, (0, 1), "attention", 4, 4)}, 5)
    for name, odd, state in (
        ("another depth", ranks - 1, State({5: Loop(1, (0, 1), "attention", 4, 4)}, 5)),
        # A rank for which nothing is due any more must not leave the others waiting.
        (
            "complete",
            0,
            State({2: complete.loops[5], 4: complete.loops[5], 5: complete.loops[5]}, 5),
        ),
    ):
        grown = controller(None, group)
        if rank == odd:
            grown.state = state
        found = ""
        try:
            train(grown, range(1, 5), rank, ranks)
        except StateMismatch as error:
            found = str(error)
        Path(folder / f"{name}-{rank}.txt").write_text(found)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """One run of real processes for each world size."""
    folders = {}
    with pytest.MonkeyPatch.context() as patch:
        # The machine's own name need not resolve to an address that gloo can use.
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        for ranks in (1, 2, 4):
            folders[ranks] = tmp_path_factory.mktemp(f"ranks{ranks}")
            mp.spawn(on_each_rank, (ranks, str(folders[ranks])), nprocs=ranks)
    return folders


@pytest.mark.parametrize(("ranks", "pieces"), SPLITS)
def test_statistic_that_depends_on_the_split(
    trained: dict[int, Path], ranks: int, pieces: int
) -> None:
    _, lines = read_journal(trained[ranks] / f"split-{ranks}-{pieces}.jsonl")
    measured = [line for line in lines if isinstance(line, Measurement)]
    assert [line.step for line in measured] == list(range(1, STEPS + 1))
    for line in measured:
        values = entropies(line.step).double()
        expected = values.mean(0)
        assert torch.allclose(torch.tensor(line.entropy).double(), expected, rtol=0, atol=1e-6)
        stderr = values.std(0, correction=1) / math.sqrt(SEQUENCES)
        assert torch.allclose(torch.tensor(line.stderr).double(), stderr, rtol=6e-3, atol=0)
        assert line.sequences == SEQUENCES


def test_decision_that_depends_on_the_split(trained: dict[int, Path]) -> None:
    reference = train(controller(), range(1, STEPS + 1))
    assert len(set(reference)) >= 4  # it does grow
    for ranks, pieces in SPLITS:
        for rank in range(ranks):
            path = trained[ranks] / f"hashes-{ranks}-{pieces}-{rank}.json"
            assert json.loads(path.read_text()) == reference


def test_rank_with_another_state_that_trains_on(trained: dict[int, Path]) -> None:
    for rank in range(4):
        assert (
            "rank 3 of 4 holds a different"
            in (trained[4] / f"another depth-{rank}.txt").read_text()
        )
        assert "rank 0 of 4 holds a different" in (trained[4] / f"complete-{rank}.txt").read_text()
    for rank in range(2):  # of two, the higher one is named: the lower one decides
        assert "rank 1 of 2 holds a different" in (trained[2] / f"complete-{rank}.txt").read_text()


def test_replay_that_is_not_the_runs_own_growth(trained: dict[int, Path]) -> None:
    head, lines = read_journal(trained[2] / "split-2-4.jsonl")
    assert head is not None
    kept = list(lines)
    own = [line.decision for line in kept if isinstance(line, DecisionLine)]
    policy = build_policy(head.method, head.growth, head.model)
    assert [d.as_json() for d in decisions(kept, policy, head.growth.entropy_ema)] == [
        d.as_json() for d in own
    ]


@pytest.mark.parametrize("stop", [3, 4, 5, 7, 10])
def test_resume_at_or_beside_a_window_that_grows_otherwise(tmp_path: Path, stop: int) -> None:
    """Cut off two steps after its checkpoint at `stop`; windows lie at 4, 7, 10, …"""
    straight, resumed = tmp_path / "straight.jsonl", tmp_path / "resumed.jsonl"
    with Journal.create(straight, header()) as journal:
        expected = train(controller(journal), range(1, STEPS + 1))
    with Journal.create(resumed, header()) as journal:
        first = controller(journal)
        hashes = train(first, range(1, stop + 1))
        saved = json.dumps(first.state_dict())
        train(first, range(stop + 1, stop + 3))
    with Journal.open_or_create(resumed, header()) as journal:
        journal.cut_back(stop)
        second = controller(journal)
        second.load_state_dict(json.loads(saved))
        hashes += train(second, range(stop + 1, STEPS + 1))
    assert hashes == expected
    assert resumed.read_bytes() == straight.read_bytes()


def test_window_without_a_measurement_of_its_own_that_grows() -> None:
    growth = GROWTH.model_copy(update={"entropy_every": 5})
    grown = controller(growth=growth)
    assert [step + 1 for step in range(STEPS) if grown.measures(step)] == [5, 10, 15, 20]
    rules = {}
    for step in range(1, STEPS + 1):
        if grown.measures(step - 1):
            grown.observe(step, sums(entropies(step), 1))
        decision = grown.decide(step, 0)
        if decision is not None:
            rules[step] = (decision.rule, decision.cause)
    stalled = ("stall", "not measured")
    assert {step: rule for step, rule in rules.items() if rule != stalled} == {
        10: ("activate", "deepest candidate")
    }
    assert rules[4] == rules[7] == rules[13] == stalled


def test_nan_of_one_head_that_stops_the_run_or_grows_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grown = controller(Journal.create(tmp_path / "growth.jsonl", header()))
    for step in range(1, 8):
        values = entropies(step)
        if step == 4:
            values[3, 2, 1] = math.nan
        grown.observe(step, sums(values, 2))
        decision = grown.decide(step, 0)
        if step == 4:
            assert decision is not None
            assert (decision.rule, decision.cause) == ("stall", "not finite")
            assert "layer 2, head 1" in decision.reason
        if step == 7:  # the run went on, and grows at the next window
            assert decision is not None
            assert decision.rule == "activate"
    assert grown.not_finite == 1
    warned = [line for line in caplog.messages if "not finite" in line]
    assert len(warned) == 1
    assert warned[0].startswith("step 4: the entropy of layer 2, head 1 is not finite")
    resumed = controller()
    resumed.load_state_dict(json.loads(json.dumps(grown.state_dict())))
    assert resumed.not_finite == 1
    kept = (tmp_path / "growth.jsonl").read_text().splitlines()
    lines = [json.loads(text) for text in kept]
    own = next(x for x in lines if x["type"] == "measure" and x["step"] == 4)
    assert own["entropy"][2][1] is None


def test_fork_at_the_first_window_that_is_not_the_run_that_grew_all_along(tmp_path: Path) -> None:
    expected = train(controller(), range(1, STEPS + 1))
    policy = build_policy("vanilla", GROWTH, MODEL)
    vanilla = GrowthController(policy, GROWTH, MODEL, journal=None, group=None, device="cpu")
    train(vanilla, range(1, 5))
    forked = controller()
    forked.fork(json.loads(json.dumps(vanilla.state_dict())))
    assert forked.decide(4, 0) is not None
    assert [forked.state.digest(), *train(forked, range(5, STEPS + 1))] == expected[3:]


def test_freeze_on_request_that_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "growth.jsonl"
    with Journal.create(path, header()) as journal:
        grown = controller(journal)
        train(grown, range(1, 6))
        state = grown.state
        decision = grown.freeze(5, flops=5)
        assert decision is not None
        assert (decision.rule, decision.cause) == ("freeze", "operator")
        assert grown.freeze(5, flops=5) is None
        resumed = controller(journal)
        resumed.load_state_dict(json.loads(json.dumps(grown.state_dict())))
        train(resumed, range(6, STEPS + 1))
    assert resumed.state == state
    assert resumed.phase(STEPS) == "fixed"
    _, lines = read_journal(path)
    kept = list(lines)
    rules = [line.decision.rule for line in kept if isinstance(line, DecisionLine)]
    assert rules == ["activate", "freeze"]
    policy = build_policy("sgt", GROWTH, MODEL)
    ema = GROWTH.entropy_ema
    assert len(list(decisions(kept, policy, ema, obey_operator=True))) == 1
    assert len(list(decisions(kept, policy, ema))) > 1
