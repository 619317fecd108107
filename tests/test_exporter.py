"""What exporters serve, read by prometheus_client's parser and by promtool."""

from __future__ import annotations

import json
import logging
import math
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from exporters import INFO, TINY, Start, exporters, looping, record, scrape, series, value
from prometheus_client.parser import text_string_to_metric_families

from sgt_ds.config import ModelConfig
from sgt_ds.telemetry import METRICS, DeviceMemory, Exporter, peak_flops
from sgt_ds.telemetry.example import full_snapshot
from sgt_ds.telemetry.hardware import Hardware, HardwareSampler
from sgt_ds.telemetry.metric import STALL_REASONS
from sgt_ds.telemetry.reference import reference, series_of
from sgt_ds.training import Heartbeat, Trainer

MARGINS = ("sgt_growth_margin_standard_errors", "sgt_growth_within_noise")


@pytest.fixture
def start() -> Iterator[Start]:
    with exporters() as start_one:
        yield start_one


class GpuHost(HardwareSampler):
    """A sampler of a machine with a GPU, which the machine of the tests need not have."""

    def sample(self) -> Hardware:
        return Hardware(1, 2, 3, 4, 5, 6, 0.5, 300.0, 7.0)


def test_every_metric_of_the_table_is_served_and_no_other(start: Start) -> None:
    exporter = start(run_steps=100, checkpoint_steps=10, hardware=GpuHost(None, None))
    exporter.publish_rank(
        part_seconds={"forward": 1.0},
        collective_seconds=0.1,
        device_memory=DeviceMemory(allocated=1, reserved=2, peak=3, size=4),
    )
    everything = {"mfu_ratio": 0.4, "planned_overhead_ratio": 0.1, "source_tokens": {"a": 1}}
    exporter.publish(record(5, loops=looping(4), **everything))
    exporter.publish_decision("activate", margin={"layer": 1.0, "head": 3.0}, within_noise=True)
    exporter.publish_load(1.0)
    exporter.publish_checkpoint(2.0)
    exporter.publish_validation(3.4)
    exporter.publish_evaluation({"sciq": {"acc": 0.25}})
    served = {
        family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        for family in text_string_to_metric_families(scrape(exporter))
        if family.name.startswith("sgt_")
    }
    # The text format has no type for info: the parser calls it a gauge, suffix and all.
    assert served == {metric.name for metric in METRICS}


def test_a_choice_within_noise_or_a_stall_that_shows_nowhere(start: Start) -> None:
    exporter = start()
    exporter.publish_decision(
        "activate", cause="deepest candidate", margin={"layer": 1.5, "head": 4.0}, within_noise=True
    )
    exporter.publish(record(5, layer_stderr=[0.02, math.nan, *[0.01] * (TINY.num_layers - 2)]))
    found = series(scrape(exporter))
    assert found["sgt_growth_margin_standard_errors", (("kind", "layer"),)] == 1.5
    assert found["sgt_growth_margin_standard_errors", (("kind", "head"),)] == 4.0
    assert found["sgt_growth_within_noise", ()] == 1
    assert found["sgt_layer_entropy_stderr_ratio", (("layer", "0"),)] == 0.02
    assert ("sgt_layer_entropy_stderr_ratio", (("layer", "1"),)) not in found
    # A later decision that weighed nothing takes the margins away.
    exporter.publish_decision("stall", cause="not finite")
    exporter.publish_decision("stall", cause="a cause of somebody's own method")
    exporter.publish(record(6, not_finite=3))
    resumed = start()
    resumed.load_state_dict(
        json.loads(json.dumps(exporter.state_dict())), skipped_steps=0, not_finite=3
    )
    for served in (exporter, resumed):
        found = series(scrape(served))
        assert not [name for name, _ in found if name.startswith(MARGINS)]
        stalls = {
            dict(labels)["reason"]: value
            for (name, labels), value in found.items()
            if name == "sgt_growth_stalls_total"
        }
        assert stalls.keys() == set(STALL_REASONS)
        assert {reason: count for reason, count in stalls.items() if count} == {
            "not finite": 1,
            "other": 1,
        }
        assert found["sgt_entropy_not_finite_total", ()] == 3


def test_promtool_finds_no_fault_in_a_scrape(start: Start) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is missing; run tests/install_services.sh")
    exporter = start()
    exporter.publish(record(5, loops=looping(4), mfu_ratio=0.4))
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=scrape(exporter), capture_output=True, text=True
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_the_values_are_those_that_were_published(start: Start) -> None:
    exporter = start(run_steps=100)
    for step in (1, 2, 3):
        exporter.observe_step(step, 0.4)
    exporter.observe_step(4, 500.0)  # longer than every bucket
    exporter.publish_decision("activate")
    exporter.publish_skip()
    exporter.publish(record(4, loops=looping(4, depth=2), skipped_steps=1))
    found = series(scrape(exporter))
    assert found["sgt_flops_overhead_ratio", ()] == 0.1
    assert found["sgt_tokens_total", ()] == 4000
    assert found["sgt_optimizer_steps_total", ()] == found["sgt_rank_step", ()] == 4
    assert found["sgt_skipped_steps_total", ()] == 1
    assert found["sgt_skipped_steps_consecutive", ()] == 0
    assert found["sgt_growth_events_total", (("kind", "activate"),)] == 1
    assert found["sgt_growth_events_total", (("kind", "stall"),)] == 0
    assert found["sgt_loop_depth", (("layer", "4"),)] == 2
    assert found["sgt_looped_head", (("head", "3"), ("layer", "4"))] == 1
    assert found["sgt_layer_entropy_ratio", (("layer", "2"),)] == 0.5
    assert found["sgt_layer_entropy_variance", (("layer", "2"),)] == 0.03125
    assert found["sgt_head_entropy_ratio", (("head", "2"), ("layer", "2"))] == 0.75
    assert found["sgt_step_duration_seconds_bucket", (("le", "0.3"),)] == 0
    assert found["sgt_step_duration_seconds_bucket", (("le", "0.5"),)] == 3
    assert found["sgt_step_duration_seconds_bucket", (("le", "120.0"),)] == 3
    assert found["sgt_step_duration_seconds_count", ()] == 4
    assert found["sgt_step_duration_seconds_sum", ()] == pytest.approx(501.2)
    assert found["sgt_run_info", tuple(sorted({**INFO, "rank": "0"}.items()))] == 1


def test_skips_in_a_row_go_on_past_an_applied_update(start: Start) -> None:
    exporter = start()
    for _ in range(3):
        exporter.publish_skip()
    assert value(exporter, "sgt_skipped_steps_consecutive") == 3
    exporter.observe_step(1, 0.4)
    exporter.publish_skip()
    assert value(exporter, "sgt_skipped_steps_consecutive") == 1
    assert value(exporter, "sgt_skipped_steps_total") == 4


def test_other_ranks_serve_no_run_wide_series(start: Start) -> None:
    first, second = start(), start(run_wide=False, rank=5)
    for exporter in (first, second):
        exporter.publish(record(5))
    wide = {metric.name for metric in METRICS if metric.scope == "run"}
    assert wide & {name for name, _ in series(scrape(first))}
    assert not wide & {name for name, _ in series(scrape(second))}
    assert value(second, "sgt_rank_step") == 5


def test_what_is_no_longer_so_is_not_served_any_more(start: Start) -> None:
    exporter = start()
    exporter.publish(record(5, loops=looping(4)))
    assert value(exporter, "sgt_loop_depth", layer="4") == 1
    entropy = [[0.5, float("nan"), 0.5, 0.5]] * TINY.num_layers
    exporter.publish(record(6, loops=looping(2), phase="fixed", entropy=entropy))
    found = series(scrape(exporter))
    assert found["sgt_loop_depth", (("layer", "4"),)] == 0
    assert found["sgt_loop_depth", (("layer", "2"),)] == 1
    assert ("sgt_looped_head", (("head", "3"), ("layer", "4"))) not in found
    assert ("sgt_head_entropy_ratio", (("head", "1"), ("layer", "0"))) not in found
    phases = {labels[0][1]: on for (name, labels), on in found.items() if name.endswith("_phase")}
    assert phases == {"warmup": 0, "growing": 0, "fixed": 1}


def test_counters_neither_fall_nor_begin_anew_after_a_crash(start: Start, tmp_path: Path) -> None:
    kept = tmp_path / "counters.json"
    crashed = start(counters_file=kept)
    crashed.publish_decision("activate")
    crashed.publish(record(100))
    state = crashed.state_dict()  # the checkpoint, step 100
    crashed.publish_decision("deepen")
    crashed.publish(record(130))
    before = series(scrape(crashed))
    crashed.close()

    resumed = start(counters_file=kept)
    resumed.load_state_dict(state, skipped_steps=0, not_finite=0)
    counters = [m.name for m in METRICS if m.kind == "counter" and m.scope == "run"]
    for step in (None, 101, 131):
        if step is not None:
            resumed.publish(record(step))
        found = series(scrape(resumed))
        for (name, labels), seen in before.items():
            if name in counters:
                assert found[name, labels] >= seen, (name, step)
        assert found["sgt_rank_step", ()] == (step or 100)  # gauges tell the truth
    assert found["sgt_tokens_total", ()] == 131_000
    assert found["sgt_growth_events_total", (("kind", "activate"),)] == 1
    assert ("sgt_checkpoint_last_success_timestamp_seconds", ()) in found


def test_what_fails_again_after_a_resume_is_not_counted(start: Start, tmp_path: Path) -> None:
    kept = tmp_path / "counters.json"

    def fail(exporter: Exporter, not_finite: int) -> None:
        for _ in range(3):
            exporter.publish_checkpoint_failure()
            exporter.publish_decision("stall", cause="not measured")
        for _ in range(15):
            exporter.publish_skip()
        exporter.publish(record(110, skipped_steps=16, not_finite=not_finite))

    def events(exporter: Exporter) -> list[float]:
        found = series(scrape(exporter))
        return [
            found["sgt_checkpoint_failures_total", ()],
            found["sgt_growth_stalls_total", (("reason", "not measured"),)],
            found["sgt_growth_events_total", (("kind", "stall"),)],
            found["sgt_skipped_steps_total", ()],
            found["sgt_entropy_not_finite_total", ()],
        ]

    first = start(counters_file=kept)
    first.publish_skip()
    first.publish(record(100, skipped_steps=1, not_finite=2))
    state = json.loads(json.dumps(first.state_dict()))
    fail(first, not_finite=6)
    seen = [3, 3, 3, 16, 6]
    assert events(first) == seen
    first.close()
    for _ in range(2):  # the second crash is before the next checkpoint, too
        resumed = start(counters_file=kept)
        assert events(resumed) == seen
        resumed.load_state_dict(state, skipped_steps=1, not_finite=2)
        assert events(resumed) == seen
        fail(resumed, not_finite=6)
        seen = [a + b for a, b in zip(seen, [3, 3, 3, 15, 4], strict=True)]
        assert events(resumed) == seen
        assert value(resumed, "sgt_tokens_total") == 110_000  # the same ones
        resumed.close()
    # One that never saved begins at 0, and goes on from what was seen.
    again = start(counters_file=kept)
    again.publish_skip()
    assert value(again, "sgt_skipped_steps_total") == seen[3] + 1


@pytest.mark.parametrize("telemetry", [True, False], ids=["on", "off"])
def test_what_training_had_counted_at_a_checkpoint_is_not_counted_again(
    start: Start, tmp_path: Path, telemetry: bool
) -> None:
    kept = tmp_path / "counters.json"

    def events(exporter: Exporter) -> list[float]:
        found = series(scrape(exporter))
        names = ("sgt_skipped_steps_total", "sgt_entropy_not_finite_total")
        return [found[name, ()] for name in names]

    first = start(counters_file=kept)
    first.publish(record(100, skipped_steps=7, not_finite=5))
    assert events(first) == [7, 5]
    first.close()
    # Taken under telemetry, or in a stint without; of an older version it lacks either count.
    state = first.state_dict() if telemetry else {}
    resumed = start(counters_file=kept)
    resumed.load_state_dict(state, skipped_steps=7, not_finite=5)
    resumed.publish(record(101, skipped_steps=7, not_finite=5))
    assert events(resumed) == [7, 5]
    resumed.publish_skip()
    resumed.publish(record(102, skipped_steps=8, not_finite=6))
    assert events(resumed) == [8, 6]
    resumed.close()
    # Those of a stint without telemetry are news.
    later = start(counters_file=kept)
    later.load_state_dict({}, skipped_steps=11, not_finite=6)
    later.publish(record(150, skipped_steps=11, not_finite=6))
    assert events(later) == [11, 6]


@pytest.mark.parametrize("telemetry", [True, False], ids=["on", "off"])
def test_a_resume_tells_its_exporter_what_training_had_counted(
    start: Start, telemetry: bool
) -> None:
    trainer: Any = MagicMock(telemetry=start(), growth=MagicMock(not_finite=5))
    state = start().state_dict() if telemetry else {}
    Trainer.load_state_dict(
        trainer,
        {
            "step": 100,
            "tokens": 100_000,
            "batches": 107,
            "skipped_steps": 7,
            "flops": {},
            "growth": {},
            "telemetry": state,
        },
    )
    assert value(trainer.telemetry, "sgt_skipped_steps_total") == 7
    assert value(trainer.telemetry, "sgt_entropy_not_finite_total") == 5


def test_an_unreadable_counters_file_does_not_stop_a_run(start: Start, tmp_path: Path) -> None:
    kept = tmp_path / "counters.json"
    kept.write_text('{"sgt_tokens_total": 7')
    exporter = start(counters_file=kept)
    exporter.publish(record(5))
    assert value(exporter, "sgt_tokens_total") == 5000


def test_a_run_that_ended_is_told_from_one_that_hangs(start: Start) -> None:
    exporter = start()
    exporter.observe_step(1, 0.4)
    assert value(exporter, "sgt_run_state", state="running") == 1
    assert time.time() - value(exporter, "sgt_rank_last_step_timestamp_seconds") < 60
    exporter.finish("completed")
    assert value(exporter, "sgt_run_state", state="running") == 0
    assert value(exporter, "sgt_run_state", state="completed") == 1


def test_a_long_evaluation_looks_like_a_hang(start: Start, tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, 0, hang_seconds=60, patient_seconds=60)
    exporter = start(progressed_at=lambda: heartbeat.progressed_at)
    exporter.observe_step(1, 0.4)
    for moves in (lambda: heartbeat.enter("validation"), heartbeat.moved):
        time.sleep(0.05)
        moves()
        found = series(scrape(exporter))
        assert found["sgt_rank_last_progress_timestamp_seconds", ()] == heartbeat.progressed_at
        assert heartbeat.progressed_at > found["sgt_rank_last_step_timestamp_seconds", ()]
        assert time.time() - heartbeat.progressed_at < 10
    exporter.observe_step(2, 0.4)
    found = series(scrape(exporter))
    assert (
        found["sgt_rank_last_progress_timestamp_seconds", ()]
        == found["sgt_rank_last_step_timestamp_seconds", ()]
    )


def test_a_failing_publication_is_told_once_and_training_goes_on(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = start()
    logging.getLogger("sgt_ds").propagate = True  # a test of the trainer may have changed it
    for _ in range(3):
        exporter.publish(None)  # type: ignore[arg-type]
        exporter.publish_decision("no such rule")
    assert len(caplog.records) == 2
    exporter.publish(record(5))
    assert value(exporter, "sgt_telemetry_failures_total") == 6
    assert value(exporter, "sgt_rank_step") == 5

    exporter.publish(record(6, entropy=[["not a number"]]))
    with pytest.raises(urllib.error.HTTPError, match="500"):
        scrape(exporter)
    exporter.publish(record(7))
    assert value(exporter, "sgt_telemetry_failures_total") == 7


def test_the_reference_page_is_what_the_table_says() -> None:
    page = Path(__file__).parent.parent / "docs" / "metrics.md"
    assert page.read_text(encoding="utf-8") == reference()


def test_the_stated_cardinality_is_that_of_a_real_scrape(start: Start) -> None:
    model = ModelConfig(
        hidden_size=1024, intermediate_size=8, num_layers=16, num_heads=16, vocab_size=8
    )
    for run_wide, host_wide in ((True, True), (False, True), (False, False)):
        exporter = start(model=model, run_wide=run_wide)
        exporter._snapshot = full_snapshot(16, 16, run_wide=run_wide, host_wide=host_wide)
        counted = series_of(run_wide=run_wide, host_wide=host_wide)
        assert len(series(scrape(exporter))) == counted


def test_the_peak_of_a_gpu_is_known_by_torchs_name_for_it() -> None:
    # Dense bf16 figures of the vendors' data sheets.
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A10") == 125e12
    assert peak_flops("NVIDIA GH200 480GB") == 989e12
    for unknown in (None, "", "NVIDIA A1000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Tesla V100"):
        assert peak_flops(unknown) is None


def test_a_metrics_row_is_json_even_where_the_loss_is_not_finite() -> None:
    row = record(5, loss=float("nan"), grad_norm=float("inf")).as_metrics_row()
    assert row["loss"] is None
    assert row["grad_norm"] is None
    assert list(row) == [
        *("step", "tokens", "loss", "learning_rate", "grad_norm", "step_seconds"),
        *("tokens_per_second", "flops", "overhead_ratio", "phase"),
    ]
