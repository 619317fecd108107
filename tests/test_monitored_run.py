"""A two-rank run that grows, hangs, is killed and resumes, seen by Debian's Prometheus."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from exporters import series
from runs import (
    end,
    environment,
    free_ports,
    launcher,
    metrics,
    run_to_end,
    single,
    write_data,
    write_run,
)

from sgt_ds.checkpoints import read_state
from sgt_ds.telemetry import METRICS

MONITORING = Path(__file__).parent.parent / "monitoring"
# A minute of the rules becomes a second here.
SHORTENED = 60
SECONDS = {"m": 60, "h": 3600, "d": 86400}


def shortened(rules: str) -> str:
    """The rules with every `for` and every range a sixtieth as long (5 s at least)."""

    def scaled(found: re.Match[str]) -> str:
        seconds = int(found[2]) * SECONDS[found[3]] // SHORTENED
        return f"{found[1]}{max(5, seconds) if found[1] == '[' else seconds}s"

    return re.sub(r"(\[|for: )(\d+)([mhd])", scaled, rules)


class Prometheus:
    """The API of one that runs."""

    def __init__(self, port: int, targets: Path, process: subprocess.Popen[bytes]) -> None:
        self._url, self._process = f"http://127.0.0.1:{port}/api/v1/", process
        self.targets = targets
        """Where it finds runs."""

    def _get(self, path: str, **parameters: str) -> Any:
        assert self._process.poll() is None, "Prometheus has ended"
        url = f"{self._url}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            return json.load(answer)["data"]

    def values(self, expression: str) -> list[float]:
        return [float(s["value"][1]) for s in self._get("query", query=expression)["result"]]

    def firing(self, *severities: str) -> set[tuple[str, str | None]]:
        """Names and ranks of the alerts that fire."""
        return {
            (alert["labels"]["alertname"], alert["labels"].get("rank"))
            for alert in self._get("alerts")["alerts"]
            if alert["state"] == "firing" and alert["labels"]["severity"] in severities
        }


def wait_for(what: str, condition: Callable[[], Any], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except OSError:
            pass  # Prometheus is not up yet
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.3)


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    """Debian's, with the shipped config, finding runs by what they write into their folders."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is missing; run tests/install_services.sh")
    shipped = tmp_path / "monitoring"
    shutil.copytree(MONITORING, shipped)
    for rules in (shipped / "rules").glob("*.yml"):
        rules.write_text(shortened(rules.read_text()))
    config = shipped / "prometheus.yml"
    text = config.read_text().replace("_interval: 15s", "_interval: 1s")
    text = text.replace("scrape_timeout: 10s", "scrape_timeout: 1s")
    config.write_text(text.replace("- files:", "- refresh_interval: 2s\n        files:"))
    port = free_ports(1)
    with (tmp_path / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                *(program, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"),
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield Prometheus(port, shipped / "targets", process)
    finally:
        process.terminate()
        process.wait(20)


def process_of_rank(run: Path, rank: int) -> int:
    """The process id of a rank of the run, told by its environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(run).encode() in words and f"RANK={rank}".encode() in variables:
            return int(folder.name)
    raise AssertionError(f"no process is rank {rank}")


@pytest.mark.network
@pytest.mark.launcher
def test_alerts_stay_silent_or_rates_jump_when_a_run_dies(
    prometheus: Prometheus, tmp_path: Path
) -> None:
    run = write_run(
        tmp_path / "night.yaml",
        write_data(tmp_path / "data"),
        training={"steps": 100_000, "log_every": 1},
        checkpoint={"every": 10},
        telemetry={"targets_dir": str(prometheus.targets)},
    )

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / "run.log").open("ab") as log:
            return subprocess.Popen(
                launcher(run, 2),
                env=environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    process = start()
    try:
        saved = "sgt_checkpoint_last_success_timestamp_seconds"
        wait_for(
            "growth, a checkpoint and both ranks",
            lambda: (
                prometheus.values(f"{saved} and sgt_rank_step > 12")
                and prometheus.values('sum(sgt_growth_events_total{kind="activate"}) > 0')
                and prometheus.values("count(sgt_rank_step)") == [2]
            ),
        )
        # As write_run and `checkpoint` above say.
        assert prometheus.values("sgt_checkpoint_interval_steps") == [10]
        recorded = "run:sgt_checkpoint_interval_seconds:mean > 0"
        wait_for("its rule", lambda: prometheus.values(recorded))
        # Nobody is woken. (Warnings of uneven throughput may be true on a busy machine.)
        assert prometheus.firing("page") == set()

        # A rank that stands still: its exporter is silent, the other's answers.
        stopped = process_of_rank(run, 1)
        os.kill(stopped, signal.SIGSTOP)
        try:
            missing = {("SgtExporterMissing", "1")}
            wait_for("SgtExporterMissing", lambda: missing <= prometheus.firing("warning"))
            assert ("SgtRunDown", None) not in prometheus.firing("page")
        finally:
            os.kill(stopped, signal.SIGCONT)
        wait_for("its end", lambda: not missing & prometheus.firing("warning"))

        [highest] = prometheus.values("max(sgt_optimizer_steps_total)")
        wait_for("more updates", lambda: prometheus.values(f"sgt_rank_step > {highest + 3}"))
        end(process)
        rows = metrics(tmp_path / "night")
        wait_for("SgtRunDown", lambda: ("SgtRunDown", None) in prometheus.firing("page"))
        # A dead run pages once, not for each rank.
        wait_for("no other", lambda: not missing & prometheus.firing("warning"))
        [highest] = prometheus.values("max(last_over_time(sgt_optimizer_steps_total[5m]))")

        process = start()
        wait_for("its end", lambda: ("SgtRunDown", None) not in prometheus.firing("page"))
        caught_up = f"sgt_rank_step > {highest + 6}"
        wait_for("the resumed run", lambda: len(prometheus.values(caught_up)) == 2)
        rows += metrics(tmp_path / "night")
    finally:
        end(process)

    # No counter of the run fell, and none rose faster than any update ever did.
    for metric in METRICS:
        if metric.kind == "counter" and metric.scope == "run":
            assert set(prometheus.values(f"resets({metric.name}[1h])")) <= {0.0}, metric.name
    [fastest] = prometheus.values("max(max_over_time(rate(sgt_tokens_total[10s])[30m:1s]))")
    # A scrape that is answered late counts what came meanwhile as if it had come in time.
    assert fastest < 1.5 * max(row["tokens_per_second"] for row in rows if "loss" in row)


@contextmanager
def serving(run: Path, port: int, output: Path) -> Iterator[Callable[[], dict[str, float]]]:
    """A run of one rank, and what it serves: values by name, behind a slash that of its one label."""
    with output.open("wb") as log:
        process = subprocess.Popen(
            single(run), env=environment(), stdout=log, stderr=log, start_new_session=True
        )

    def served() -> dict[str, float]:
        assert process.poll() is None, output.read_text()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            found = series(answer.read().decode())
        return {
            "/".join([name, *(own for _, own in labels)]): found[name, labels]
            for name, labels in found
        }

    try:
        yield served
    finally:
        end(process)


@pytest.mark.network
def test_what_a_run_has_spent_is_told_every_log_interval_only(tmp_path: Path) -> None:
    port = free_ports(1)
    run = write_run(
        tmp_path / "silent.yaml",
        write_data(tmp_path / "data"),
        training={"steps": 100_000, "log_every": 100_000, "validate_every": 100_000},
        checkpoint={"every": 100_000},
        telemetry={"port": port},
    )
    with serving(run, port, tmp_path / "log") as served:
        wait_for("ten updates", lambda: served()["sgt_rank_step"] >= 10)
        first = served()
        wait_for("ten more", lambda: served()["sgt_rank_step"] >= first["sgt_rank_step"] + 10)
        found = served()
    assert "sgt_loss" not in found, "logged"
    # A scrape may come just before the tokens of its last update.
    assert 0 <= 64 * 8 * found["sgt_rank_step"] - found["sgt_tokens_total"] <= 64 * 8
    for name in ("sgt_tokens_total", "sgt_flops_total", "sgt_vanilla_flops_total"):
        assert found[name] > first[name] > 0
    for part in ("data", "forward", "backward", "optimizer", "growth"):
        name = f"sgt_step_part_seconds_total/{part}"
        assert found[name] > first[name] > 0


EVENTS = (
    *("sgt_skipped_steps_total", "sgt_growth_events_total", "sgt_growth_stalls_total"),
    *("sgt_checkpoint_failures_total", "sgt_entropy_not_finite_total"),
)


@pytest.mark.network
@pytest.mark.launcher
def test_a_fork_or_a_copy_of_a_run_counts_at_once_what_its_parent_met(tmp_path: Path) -> None:
    """The parent skips an update and grows; 18 steps of 20 are in the checkpoint."""
    port, data = free_ports(1), write_data(tmp_path / "data")
    parent = write_run(tmp_path / "parent.yaml", data)
    command = launcher(parent, 2)
    script = Path(__file__).parent / "inf_gradient.py"
    command[command.index("--module") : command.index("sgt_ds.train") + 1] = [str(script)]
    run_to_end(command)
    checkpoint = tmp_path / "parent" / "checkpoints" / "step-00000018"
    events = read_state(checkpoint)["telemetry"]["counters"]
    assert events["sgt_skipped_steps_total"] == {"": 1}
    assert events["sgt_growth_events_total"]["activate"] > 0
    copy: dict[str, Any] = {"resume": str(checkpoint)}
    fork = {
        **{"fork": str(checkpoint), "method": "vanilla", "growth": {}},
        **{"training": {"steps": 100_000}, "checkpoint": {"every": 100_000}},
    }
    for name, start in (("fork", fork), ("copy", copy)):
        run = write_run(tmp_path / f"{name}.yaml", data, telemetry={"port": port}, **start)
        scrapes: list[dict[str, float]] = []
        with serving(run, port, tmp_path / f"{name}.log") as served:
            deadline = time.monotonic() + 240
            while not scrapes or scrapes[-1]["sgt_rank_step"] < 20:
                with suppress(OSError):
                    scrapes.append(served())
                assert time.monotonic() < deadline
                time.sleep(0.02)
        for counter in ("sgt_optimizer_steps_total", "sgt_tokens_total"):
            assert min(one[counter] for one in scrapes if counter in one) >= events[counter][""]
        for counter in EVENTS:
            for label, count in events[counter].items():
                series = f"{counter}/{label}".rstrip("/")
                seen = {one[series] for one in scrapes if series in one}
                assert min(seen) == (0 if name == "fork" else count), series
                assert len(seen) == 1 or name == "copy", series
        if name == "fork":
            assert not any("sgt_growth_within_noise" in one for one in scrapes)


@pytest.mark.network
def test_a_run_that_diverged_shows_a_finite_loss_and_nothing_else(tmp_path: Path) -> None:
    port = free_ports(1)
    run = write_run(
        tmp_path / "diverged.yaml",
        write_data(tmp_path / "data"),
        optimizer={"lr": 1e30},
        training={"max_skipped_steps": 1_000_000},
        telemetry={"port": port},
    )
    with serving(run, port, tmp_path / "log") as served:
        wait_for("five skips", lambda: served()["sgt_skipped_steps_total"] >= 5)
        found = served()
    assert found["sgt_loss"] < 10
    # Skipped updates are no hang.
    stamp = "sgt_rank_last_{}_timestamp_seconds"
    assert found[stamp.format("progress")] > found[stamp.format("step")]
    # None was applied in between.
    assert found["sgt_skipped_steps_consecutive"] == found["sgt_skipped_steps_total"] >= 5
