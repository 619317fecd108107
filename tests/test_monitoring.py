"""What lies in monitoring/, held against a real Prometheus (Debian's) that scrapes real exporters."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sgt_ds.config import PRESETS, TelemetryConfig
from sgt_ds.growth import Loop, State
from sgt_ds.ports import free_ports
from sgt_ds.telemetry import (
    METRICS,
    OWN_PARTS,
    STEP_PARTS,
    DeviceMemory,
    Exporter,
    HardwareSampler,
    StepRecord,
    TargetGroup,
    beyond_loopback,
    targets,
)
from sgt_ds.telemetry.hardware import Hardware
from sgt_ds.telemetry.metrics import BY_NAME

ROOT = Path(__file__).parent.parent
MONITORING = ROOT / "monitoring"
MODEL = PRESETS["tiny"]


def service(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is missing; run tests/install_services.sh")
    return path


def record(step: int) -> StepRecord:
    loop = Loop(depth=1, heads=(0, 2), scope="attention", step=0, entered=0)
    return StepRecord(
        step=step,
        tokens=step * 1000,
        loss=3.0,
        learning_rate=1e-3,
        grad_norm=1.0,
        step_seconds=0.2,
        tokens_per_second=5000.0,
        flops=step * 1_010_000,
        vanilla_flops=step * 1_000_000,
        overhead_ratio=0.01,
        flops_per_token=1010,
        mfu_ratio=0.4,
        data_wait_seconds=0.01 * step,
        source_tokens={"shards/c4": step},
        skipped_steps=0,
        phase="growing",
        loops=State({4: loop}, 4),
        entropy=[[0.1 * head + 0.01 * layer for head in range(4)] for layer in range(6)],
        layer_stderr=[0.01] * 6,
        planned_overhead_ratio=0.011,
    )


class GpuHost(HardwareSampler):
    """A sampler of a machine with GPUs, which the machine of the tests need not have."""

    def sample(self) -> Hardware:
        return Hardware(2**36, 2**37, 10**9, 10**9, 2**40, 2**41, 0.9, 500.0, 10**6)


class Run:
    """Two exporters, as of a run of two ranks, and the means to crash it."""

    def __init__(self, port: int, counters_file: Path) -> None:
        self._port, self._counters_file = port, counters_file
        self.exporters: list[Exporter] = []
        self.step = 0

    def start(self) -> None:
        for rank in range(2):
            exporter = Exporter(
                TelemetryConfig(port=self._port),
                run_wide=rank == 0,
                local_rank=rank,
                rank=rank,
                info={"run": "trial", "method": "sgt"},
                model=MODEL,
                run_steps=1000,
                checkpoint_steps=100,
                counters_file=self._counters_file,
                hardware=GpuHost(None, None),
            )
            exporter.start()
            self.exporters.append(exporter)

    def advance(self) -> None:
        self.step += 1
        for exporter in self.exporters:
            exporter.publish(record(self.step))
            margin = {"layer": 3.0, "head": 2.5}
            exporter.publish_decision("activate", margin=margin, within_noise=False)
            exporter.publish_rank(
                part_seconds=dict.fromkeys(STEP_PARTS, 0.02 * self.step),
                collective_seconds=0.001 * self.step,
                device_memory=DeviceMemory(2**34, 2**35, 2**35, 2**37),
            )
        self.exporters[0].publish_checkpoint(1.0)
        self.exporters[0].publish_load(0.5)
        self.exporters[0].publish_validation(3.1)
        self.exporters[0].publish_evaluation({"arc_easy": {"acc": 0.4, "bpb": 1.2}})

    def crash(self) -> None:
        for exporter in self.exporters:
            exporter.close()
        self.exporters.clear()


class Prometheus:
    """A running Prometheus and its API."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def get(self, path: str, **parameters: str) -> Any:
        url = f"{self._url}{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def query(self, expr: str) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.get("query", query=expr)["result"]
        return result


def wait_until(condition: Any, run: Run, seconds: float = 60) -> None:
    """Let the run advance twice a second until `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "Prometheus did not get that far"
        run.advance()
        time.sleep(0.5)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, Run]]:
    """A Prometheus with the shipped config, found by `sgt-ds monitor targets`, and its run."""
    program = service("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    shipped = folder / "monitoring"
    shutil.copytree(MONITORING, shipped)
    config = shipped / "prometheus.yml"
    text, changes = re.subn(r"_interval: 15s", "_interval: 1s", config.read_text())
    assert changes == 2
    config.write_text(text.replace("scrape_timeout: 10s", "scrape_timeout: 1s"))

    port = free_ports(2)
    hostfile = folder / "hostfile"
    hostfile.write_text("localhost slots=2\n")
    out = shipped / "targets" / "trial.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "sgt_ds", "monitor", "targets", str(hostfile)),
            *("--run", "trial", "--port", str(port), "--out", str(out)),
        ],
        check=True,
        timeout=60,
    )
    run = Run(port, folder / "counters.json")
    run.start()
    api = free_ports(1)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                *(program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"),
                f"--web.listen-address=127.0.0.1:{api}",
            ],
            stdout=log,
            stderr=log,
        )
        prometheus = Prometheus(api)

        def is_ready() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            try:
                # The rule that needs most: two scrapes of each rank, then an evaluation.
                return bool(prometheus.query("run:sgt_step_work_seconds:imbalance_ratio"))
            except OSError:
                return False

        try:
            wait_until(is_ready, run)
            wait_until(lambda: run.step > 12, run)
            time.sleep(2)
            yield prometheus, run
        finally:
            process.terminate()
            process.wait(20)
            run.crash()


def shipped_expressions() -> list[str]:
    """Every PromQL expression of the committed dashboards, with its variables filled in."""
    expressions = []
    for file in sorted((MONITORING / "grafana" / "dashboards").glob("*.json")):
        document = json.loads(file.read_text())
        for panel in document["panels"]:
            expressions += [target["expr"] for target in panel.get("targets", ())]
        expressions += [
            annotation["target"]["expr"] for annotation in document["annotations"]["list"]
        ]
        for variable in document["templating"]["list"]:
            if variable["type"] == "query":
                found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
                assert found
                expressions.append(f"count by ({found[2]}) ({found[1]})")
    filled = {"$run": "trial", "$host": ".*", "$rank": ".*", "$__rate_interval": "1m"}
    for variable, value in filled.items():
        expressions = [expr.replace(variable, value) for expr in expressions]
    return expressions


@pytest.mark.network
def test_every_expression_of_the_dashboards_finds_something(
    scraped: tuple[Prometheus, Run],
) -> None:
    prometheus, _ = scraped
    expressions = shipped_expressions()
    assert len(expressions) > 90
    empty = [expr for expr in expressions if not prometheus.query(expr)]
    # A run that goes well fires no alert: the fleet's table of them is empty.
    assert [expr for expr in empty if not expr.startswith("max by (severity, alertname")] == []


@pytest.mark.network
def test_every_rule_is_evaluated_without_an_error(scraped: tuple[Prometheus, Run]) -> None:
    prometheus, _ = scraped
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == 33
    assert {rule["health"] for rule in rules} == {"ok"}
    empty = [
        r["name"] for r in rules if r["type"] == "recording" and not prometheus.query(r["name"])
    ]
    assert not empty
    # A run that goes well raises none of the alerts.
    assert [rule["name"] for rule in rules if rule.get("state") not in (None, "inactive")] == []


@pytest.mark.network
def test_prometheus_sees_every_rank_under_its_own_labels(
    scraped: tuple[Prometheus, Run],
) -> None:
    prometheus, _ = scraped
    seen = {
        (series["metric"]["run"], series["metric"]["host"], series["metric"]["rank"])
        for series in prometheus.query("sgt_rank_step")
    }
    assert seen == {("trial", "localhost", "0"), ("trial", "localhost", "1")}
    stored = set(prometheus.get("label/__name__/values"))
    suffix = {"histogram": "_count"}
    missing = {m.name + suffix.get(m.kind, "") for m in METRICS} - stored
    assert not missing
    info = prometheus.query('sgt_run_info{run="trial", method="sgt", rank="1"}')
    assert len(info) == 1
    assert "exported_run" not in info[0]["metric"]


@pytest.mark.network
def test_rates_show_no_jump_where_a_run_crashed_and_resumed(
    scraped: tuple[Prometheus, Run],
) -> None:
    prometheus, run = scraped
    checkpoint, saved_at = run.exporters[0].state_dict(), run.step
    wait_until(lambda: run.step > saved_at + 6, run)
    time.sleep(1.5)  # seen by a scrape
    highest = run.step
    run.crash()
    time.sleep(2.5)
    run.start()
    for exporter in run.exporters:
        exporter.load_state_dict(checkpoint, skipped_steps=0, not_finite=0)
    run.step = saved_at
    wait_until(lambda: run.step > highest + 6, run)
    time.sleep(1.5)
    counters = [m.name for m in METRICS if m.kind == "counter" and m.scope == "run"]
    for name in counters:
        resets = {float(s["value"][1]) for s in prometheus.query(f"resets({name}[5m])")}
        assert resets == {0.0}, name
    [tokens] = prometheus.query("max_over_time(sgt_tokens_total[5m])")
    assert float(tokens["value"][1]) == run.step * 1000
    [increase] = prometheus.query("increase(sgt_tokens_total[5m])")
    # increase() extrapolates to the window's edges, by half a scrape interval at most.
    assert float(increase["value"][1]) < 1.2 * run.step * 1000


@pytest.mark.network
def test_promtool_accepts_the_configuration_and_its_tests_hold() -> None:
    promtool = service("promtool")
    rules, cases = (
        [str(file) for file in sorted((MONITORING / folder).glob("*.yml"))]
        for folder in ("rules", "tests")
    )
    for arguments in (
        ["check", "config", str(MONITORING / "prometheus.yml")],
        ["check", "config", "--agent", str(MONITORING / "prometheus-agent.yml")],
        ["check", "rules", *rules],
        ["test", "rules", *cases],
    ):
        done = subprocess.run([promtool, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_in_a_container_lacks_files_that_its_configuration_names() -> None:
    compose = yaml.safe_load((MONITORING / "docker-compose.yml").read_text())
    volumes = [volume.split(":") for volume in compose["services"]["prometheus"]["volumes"]]
    mounted = {source: inside for source, inside, *_ in volumes}
    # In comments, too: those are to be uncommented.
    text = (MONITORING / "prometheus.yml").read_text()
    folders = set(re.findall(r"(?:- |file: )(\w+)/[\w*]", text))
    assert folders == {"rules", "targets", "tls"}
    for folder in folders:
        assert (MONITORING / folder).is_dir()
        assert mounted[f"./{folder}"] == f"/etc/prometheus/{folder}"


def alerts() -> list[dict[str, Any]]:
    files = (MONITORING / "rules").glob("*.yml")
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def test_every_alert_has_a_runbook_and_cases_that_fire_and_do_not() -> None:
    files = (MONITORING / "tests").glob("*.yml")
    tests = [test for file in files for test in yaml.safe_load(file.read_text())["tests"]]
    cases = [case for test in tests for case in test.get("alert_rule_test", ())]
    names = [alert["alert"] for alert in alerts()]
    for alert in alerts():
        name = alert["alert"]
        assert alert["labels"]["severity"] in ("page", "warning", "info")
        # A path, so not a runbook_url: Alertmanager and Grafana would make a dead link of that.
        assert "runbook_url" not in alert["annotations"]
        path, where = alert["annotations"]["runbook"].split(", ")
        assert (path, where) == (
            f"monitoring/runbooks/{name}.md",
            "in a checkout or under share/sgt-ds",
        )
        text = (ROOT / path).read_text()
        assert text.startswith(f"# {name} ({alert['labels']['severity']})\n")
        for part in ("**Meaning.**", "**Diagnosis.**", "**Likely causes.**", "**Mitigation.**"):
            assert part in text, (name, part)
        fires = {bool(case["exp_alerts"]) for case in cases if case["alertname"] == name}
        assert fires == {True, False}, name
    assert {file.stem for file in (MONITORING / "runbooks").glob("*.md")} == set(names)


def test_rules_runbooks_and_dashboards_name_no_metric_that_is_not_served() -> None:
    served = set(BY_NAME) | {
        f"sgt_step_duration_seconds_{part}" for part in ("bucket", "sum", "count")
    }
    recorded = set(re.findall(r"record: (\S+)", (MONITORING / "rules/recording.yml").read_text()))
    for file in MONITORING.rglob("*"):
        if file.suffix not in (".yml", ".json", ".md"):
            continue
        text = file.read_text()
        words = set(re.findall(r"(?<![\w:])sgt_[a-z_]+(?![\w:*])", text)) - {"sgt_ds"}
        assert words <= served, file
        assert set(re.findall(r"\b(?:run|rank):sgt_[a-z_]+:\w+", text)) <= recorded, file


def test_the_rules_count_other_phases_as_a_ranks_own_work_than_top_does() -> None:
    rules = (MONITORING / "rules/recording.yml").read_text()
    assert f'part=~"{"|".join(OWN_PARTS)}"' in rules


def test_targets_number_the_ranks_in_the_hostfiles_order() -> None:
    groups = targets([("b", 2), ("a", 1), ("fe80::1", 1)], run="r", port=9400)
    assert [(group["targets"], group["labels"]) for group in groups] == [
        (["b:9400"], {"run": "r", "host": "b", "rank": "0", "__param_run": "r"}),
        (["b:9401"], {"run": "r", "host": "b", "rank": "1", "__param_run": "r"}),
        (["a:9400"], {"run": "r", "host": "a", "rank": "2", "__param_run": "r"}),
        (["[fe80::1]:9400"], {"run": "r", "host": "fe80::1", "rank": "3", "__param_run": "r"}),
    ]


def test_the_loopback_of_another_host_is_scraped_as_that_of_the_first() -> None:
    def at(address: str, host: str, rank: int) -> TargetGroup:
        return {
            "targets": [address],
            "labels": {"run": "r", "host": host, "rank": str(rank)},
        }

    first = [at("127.0.0.1:9400", "a", 0), at("127.0.0.1:9401", "a", 1)]
    rest = [at("127.0.0.1:9400", "b", 2), at("[::1]:9401", "c", 3), at("localhost:9402", "d", 4)]
    reachable = [at("10.0.0.7:9400", "e", 5), at("f:9400", "f", 6)]
    announced = beyond_loopback([*first, *rest, *reachable])
    addresses = [group["targets"] for group in announced]
    own, others = addresses[:2], addresses[2:]
    assert own == [["127.0.0.1:9400"], ["127.0.0.1:9401"]]
    assert others == [["b:9400"], ["c:9401"], ["d:9402"], ["10.0.0.7:9400"], ["f:9400"]]
    assert [group["labels"]["rank"] for group in announced] == list("0123456")
