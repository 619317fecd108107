"""Whole runs through the real launcher: resumed, cut in other ways over ranks, stopped, forked."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs

from sgt_ds.checkpoints import list_checkpoints, read_state
from sgt_ds.cli import main
from sgt_ds.ports import free_ports
from sgt_ds.report import read_history
from sgt_ds.telemetry import read_outcome

pytestmark = pytest.mark.launcher


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Run directory of 20 steps on two ranks, with warm-up, growing and fixed phase."""
    run = runs.write_run(tmp_path_factory.mktemp("whole") / "run.yaml", data)
    runs.run_to_end(runs.launcher(run, 2))
    return run.with_suffix("")


def test_a_run_learns_and_grows_through_all_phases(uninterrupted: Path) -> None:
    rows = [row for row in runs.metrics(uninterrupted) if "loss" in row]
    assert abs(rows[0]["loss"] - math.log(512)) < 0.1  # untrained: all 512 ids alike
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.4
    assert [row["phase"] for row in rows[::5]] == ["warmup", "growing", "growing", "fixed"]
    assert len([row for row in runs.metrics(uninterrupted) if "validation_loss" in row]) == 2
    rules = runs.check_replay(uninterrupted)
    assert rules[:2] == ["activate", "deepen"]


def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, data: Path, uninterrupted: Path
) -> None:
    # More steps than it will make, so that the signal finds it at work; same schedule otherwise.
    run = runs.write_run(tmp_path / "run.yaml", data)
    process = subprocess.Popen(
        ["sgt-ds", "train", str(run), "--num-gpus", "2"],
        env=runs.environment(),
        start_new_session=True,
    )
    try:
        runs.wait_for_step(tmp_path / "run", 7)  # in the entry window of a layer
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        runs.end(process)
    stopped_at = runs.last_step(tmp_path / "run")
    assert 7 <= stopped_at < 20
    runs.run_to_end(["sgt-ds", "train", str(run), "--num-gpus", "2"])
    assert runs.losses(tmp_path / "run") == runs.losses(uninterrupted)
    assert runs.journal_lines(tmp_path / "run") == runs.journal_lines(uninterrupted)
    runs.check_replay(tmp_path / "run")


def test_one_rank_grows_as_two_do_and_loses_alike(
    tmp_path: Path, data: Path, uninterrupted: Path
) -> None:
    run = runs.write_run(tmp_path / "run.yaml", data)
    runs.run_to_end(runs.single(run, "training.micro_batch_size=4"))
    of_one, of_two = runs.losses(tmp_path / "run"), runs.losses(uninterrupted)
    assert max(abs(of_one[step] - of_two[step]) for step in of_two) < 1e-6

    def loops(run_dir: Path) -> list[object]:
        return [line["loops"] for line in runs.journal_lines(run_dir) if line["type"] == "decision"]

    assert loops(tmp_path / "run") == loops(uninterrupted)
    runs.check_replay(tmp_path / "run")


def test_an_inf_gradient_on_one_rank_skips_the_update_on_all(tmp_path: Path, data: Path) -> None:
    run = runs.write_run(tmp_path / "run.yaml", data)
    script = Path(__file__).parent / "inf_gradient.py"
    command = runs.launcher(run, 2)
    command[command.index("--module") : command.index("sgt_ds.train") + 1] = [str(script)]
    output = runs.run_to_end(command)
    assert output.count("update skipped, gradients not finite") == 1
    losses = runs.losses(tmp_path / "run")
    assert sorted(losses) == list(range(1, 21))  # the clock counts applied updates
    assert all(math.isfinite(loss) for loss in losses.values())
    # The batch of the skipped update is consumed: tokens count 21 batches.
    assert runs.metrics(tmp_path / "run")[-2]["tokens"] == 21 * 8 * 64
    runs.check_replay(tmp_path / "run")


@pytest.mark.parametrize(
    ("save_every", "log_every", "validate_every"), [(1, 5, 100), (100, 5, 100), (100, 4, 4)]
)
def test_a_skip_at_the_end_of_the_data_leaves_the_last_update_untold_or_tells_it_twice(
    save_every: int, log_every: int, validate_every: int, tmp_path: Path, data: Path
) -> None:
    """The data last for nine updates; the ninth is skipped."""
    sizes = {"global_batch_size": 64, "micro_batch_size": 16, "steps": 20}
    run = runs.write_run(
        tmp_path / "run.yaml",
        data,
        data={"exhausted": "stop"},
        training={**sizes, "log_every": log_every, "validate_every": validate_every},
        checkpoint={"every": save_every},
    )
    script = str(Path(__file__).parent / "inf_gradient.py")
    told = runs.run_to_end([sys.executable, script, *runs.single(run)[3:]])
    assert "step 8: update skipped" in told
    rows = [row for row in runs.metrics(tmp_path / "run") if row["step"] == 8]
    logged, validated = sorted(rows, key=lambda row: "validation_loss" in row)
    assert math.isfinite(logged["loss"] + logged["grad_norm"])
    [newest] = list_checkpoints(tmp_path / "run" / "checkpoints")[:1]
    assert newest.step == 8
    if save_every > 1:
        assert newest.validation_loss == validated["validation_loss"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_reducing_in_place_changes_a_bit_or_copies_buckets(
    ranks: int, tmp_path: Path, data: Path
) -> None:
    values = json.loads(Path("ds_configs/zero2_bf16.json").read_text())
    # Buckets of some parameters, and parameters larger than a bucket.
    values["zero_optimization"]["reduce_bucket_size"] = 20_000
    (tmp_path / "small_buckets.json").write_text(json.dumps(values))
    script, sums = str(Path(__file__).parent / "zero_sums.py"), []
    for mode in ((), ("plain",)):
        run = runs.write_run(
            tmp_path / f"run{len(sums)}.yaml",
            data,
            deepspeed=str(tmp_path / "small_buckets.json"),
            training={"steps": 4, "validate_every": 4},
        )
        command = runs.single(run) if ranks == 1 else runs.launcher(run, ranks)
        at = command.index("sgt_ds.train")
        command[at - 1 : at + 1] = [script]
        runs.run_to_end([*command, *mode])
        written = sorted(run.with_suffix("").glob("sums-*.json"))
        sums.append([json.loads(file.read_text()) for file in written])
    in_place, plain = sums
    assert [digest for digest, _ in in_place] == [digest for digest, _ in plain]
    assert [copied for _, copied in in_place] == [0] * ranks
    assert all(copied > 0 for _, copied in plain)


def test_a_run_forked_from_vanilla_equals_one_that_grew_all_along(
    tmp_path: Path, data: Path
) -> None:
    grown = runs.write_run(tmp_path / "grown.yaml", data)
    vanilla = runs.write_run(
        tmp_path / "vanilla.yaml", data, method="vanilla", checkpoint={"every": 4}
    )
    checkpoint = tmp_path / "vanilla" / "checkpoints" / "step-00000004"
    forked = runs.write_run(tmp_path / "forked.yaml", data, fork=str(checkpoint))
    for run in (grown, vanilla, forked):
        runs.run_to_end(runs.single(run, "checkpoint.keep_last=9"))
        runs.check_replay(run.with_suffix(""))
    of_grown, of_forked = runs.losses(tmp_path / "grown"), runs.losses(tmp_path / "forked")
    assert {step: loss for step, loss in of_grown.items() if step > 4} == of_forked
    # And until growth begins, the method changes nothing at all.
    of_vanilla = runs.losses(tmp_path / "vanilla")
    assert all(of_vanilla[step] == of_grown[step] for step in range(1, 5))


def test_a_fork_with_another_batch_size_reads_sequences_twice_or_leaves_some_out(
    tmp_path: Path, data: Path
) -> None:
    parent = runs.write_run(tmp_path / "parent.yaml", data, method="vanilla", training={"steps": 4})
    runs.run_to_end(runs.single(parent))
    # 4 × 8 sequences are read: three batches of 12 hold them, two of 16 exactly.
    for size, batches in ((12, 3), (16, 2), (4, 8)):
        forked = runs.write_run(
            tmp_path / f"forked-{size}.yaml",
            data,
            fork=str(tmp_path / "parent" / "checkpoints" / "step-00000004"),
            training={"steps": 5, "global_batch_size": size, "micro_batch_size": 4},
        )
        runs.run_to_end(runs.single(forked))
        checkpoint = tmp_path / f"forked-{size}" / "checkpoints" / "step-00000005"
        assert read_state(checkpoint)["batches"] == batches + 1
        assert read_state(checkpoint)["tokens"] == (4 * 8 + size) * 64


def test_a_fork_with_another_moving_average_decides_from_its_parents(
    tmp_path: Path, data: Path
) -> None:
    parent = runs.write_run(tmp_path / "parent.yaml", data, method="vanilla", training={"steps": 4})
    checkpoint = tmp_path / "parent" / "checkpoints" / "step-00000004"
    forked = runs.write_run(
        tmp_path / "forked.yaml",
        data,
        fork=str(checkpoint),
        growth={"entropy_ema": 0.9},
        training={"steps": 5},
    )
    for run in (parent, forked):
        runs.run_to_end(runs.single(run))
    assert runs.check_replay(tmp_path / "forked") == ["activate"]


def test_a_fork_loses_the_loops_of_its_parent_without_a_word_or_does_not_replay(
    tmp_path: Path, data: Path, uninterrupted: Path
) -> None:
    checkpoint = max((uninterrupted / "checkpoints").glob("step-*"))
    loops = json.loads((checkpoint / "state.json").read_text())["state"]["loops"]
    assert loops
    # It ends where its parent did, and its journal must replay all the same.
    run = runs.write_run(tmp_path / "run.yaml", data, fork=str(checkpoint))
    told = runs.run_to_end(runs.launcher(run, 2))
    layers = ", ".join(sorted(loops, key=int))
    assert (
        f"fork: the loops of {checkpoint} (layers {layers}) are not carried over; growth starts"
        in told
    )


def test_killing_a_run_loses_nothing_but_the_steps_since_its_checkpoint(
    tmp_path: Path, data: Path, uninterrupted: Path
) -> None:
    run = runs.write_run(tmp_path / "run.yaml", data)
    process = subprocess.Popen(
        runs.launcher(run, 2), env=runs.environment(), start_new_session=True
    )
    runs.wait_for_step(tmp_path / "run", 9)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    runs.run_to_end(runs.launcher(run, 2))
    assert runs.losses(tmp_path / "run") == runs.losses(uninterrupted)
    assert runs.journal_lines(tmp_path / "run") == runs.journal_lines(uninterrupted)
    runs.check_replay(tmp_path / "run")
    first, second = read_history(tmp_path / "run").starts
    assert (first.step, first.reached) == (0, None)
    assert second.reached is not None
    assert second.step in (6, 12, 18)
    assert second.step <= second.reached
    assert second.values["world_size"] == 2
    assert second.values["device"].endswith("(CPU, 1 thread per rank)")
    out = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "run"), str(uninterrupted), "-o", str(out)]) == 0
    assert "loops ×2" in out.read_text()


def test_a_run_whose_data_end_fails_or_is_not_saved(tmp_path: Path, data: Path) -> None:
    """624 sequences of 64 tokens last for nine updates of 64; documents are told apart as well."""
    run = runs.write_run(
        tmp_path / "run.yaml",
        data,
        data={"exhausted": "stop", "document_mask": True},
        training={"global_batch_size": 64, "micro_batch_size": 16, "steps": 20},
    )
    supervised = ["sgt-ds", "train", str(run), "--max-restarts", "1"]
    told = runs.run_to_end(supervised)
    assert "lasts for 9 of 20 updates" in told
    assert "step 9/20  ETA 0s" in told
    reason = f"complete at step 9 of 20: {data / 'train'} is exhausted (data.exhausted: stop)"
    assert told.endswith(f"sgt-ds train: {reason}\n")
    assert "restart" not in told
    assert sorted(runs.losses(tmp_path / "run")) == list(range(1, 10))
    assert (tmp_path / "run" / "checkpoints" / "step-00000009").is_dir()
    [validated] = [row for row in runs.metrics(tmp_path / "run") if "validation_loss" in row]
    assert validated["step"] == 9, "the last update is validated too"
    [newest] = list_checkpoints(tmp_path / "run" / "checkpoints")[:1]
    assert newest.validation_loss == validated["validation_loss"]
    # Started again, it has nothing to do; with other data it says what differs, unless told to go on.
    for start in (runs.single(run), supervised):
        assert "is exhausted" in runs.run_to_end(start)
        outcome = read_outcome(tmp_path / "run" / "control")
        assert outcome is not None
        assert (outcome.status, outcome.reason) == (0, reason)
        told = runs.run_to_end(["sgt-ds", "stop", str(tmp_path / "run")], expect=2)
        assert "is complete at step 9 of 20: its data have ended; there is nothing to stop" in told
    other = f"data.train=[{{path: {data / 'val'}}}]"
    told = runs.run_to_end(runs.single(run, other), expect=2)
    assert f"data.train.0 ({data / 'val'}): tokens 40000 -> 4000" in told
    going_on = runs.single(
        run, other, "data.accept_changed=true", "data.exhausted=repeat", "training.log_every=1"
    )
    told = runs.run_to_end(going_on)
    assert "continuing with changed data" in told
    assert sorted(runs.losses(tmp_path / "run")) == list(range(1, 21))


@pytest.mark.parametrize(("end", "scraped"), [("data", 0), ("stop", 0), ("stop", 1)])
def test_of_two_hosts_the_one_that_ends_first_is_taken_for_dead_or_hides_why_they_end(
    end: str, scraped: int, tmp_path: Path, data: Path
) -> None:
    """Two supervisors without ssh; one rank waits for its scraper, the other has none."""
    ports = free_ports(4)
    run = runs.write_run(
        tmp_path / "run.yaml",
        data,
        data={"exhausted": "stop" if end == "data" else "repeat"},
        training={
            **{"global_batch_size": 64, "micro_batch_size": 16},
            "steps": 20 if end == "data" else 1000,
            **{"hang_seconds": 60, "collective_timeout_seconds": 60},  # it waits for half of that
        },
        telemetry={"port": ports, "port_in_use": "next"},
    )
    place = ["--no-ssh", "--num-nodes", "2", "--num-gpus", "1", "--master-addr", "127.0.0.1"]
    place += ["--master-port", str(free_ports())]
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for node, log in enumerate(logs):
            with log.open("wb") as out:
                started.append(
                    subprocess.Popen(
                        ["sgt-ds", "train", str(run), *place, "--node-rank", str(node)],
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        env=runs.environment(),
                        start_new_session=True,
                    )
                )
        waiting, other = (started[scraped], started[1 - scraped])
        targets, deadline = tmp_path / "run" / "targets.json", time.monotonic() + 240
        while not targets.exists():
            assert time.monotonic() < deadline, logs[0].read_text()
            time.sleep(0.02)
        runs.scrape(targets, scraped)
        if end == "stop":
            stop = ["sgt-ds", "stop", str(tmp_path / "run")]
            started.append(subprocess.Popen(stop, env=runs.environment(), start_new_session=True))
        assert other.wait(timeout=120) == 0, logs[1 - scraped].read_text()
        assert waiting.poll() is None, "it waits for its scraper"
        runs.scrape(targets, scraped)
        for process in (waiting, *started[2:]):
            assert process.wait(timeout=60) == 0, logs[scraped].read_text()
    finally:
        for process in started:
            runs.end(process)
    told = {"data": "complete at step 9 of 20", "stop": "stopped as requested"}
    for log in logs:
        assert f"sgt-ds train: {told[end]}" in log.read_text()
