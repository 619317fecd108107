"""The dashboards as code: what Grafana's types, a real run and a reader say to them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from runs import end, environment, free_ports, launcher, write_data, write_run
from test_monitoring import MONITORING, Prometheus, service, shipped_expressions

from sgt_ds.telemetry.dashboards import DASHBOARDS, write_dashboards
from sgt_ds.telemetry.dashboards import main as write_all
from sgt_ds.telemetry.grafana_panels import COLOURS

TYPES = Path(__file__).parent / "grafana"
JSON = MONITORING / "grafana" / "dashboards"
# Empty on a CPU; the table of firing alerts, as it may be; a run that is not evaluated in the loop.
# These must parse all the same. test_monitoring.py finds the first and the last on made values.
EMPTY_HERE = re.compile(
    r"sgt_gpu_|sgt_mfu_ratio|^max by \(severity, alertname|sgt_evaluation_score"
)


def documents() -> dict[str, Any]:
    """The committed dashboards by uid."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(JSON.glob("*.json"))}


def panels(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in document["panels"] if panel["type"] != "row"]


def values_of(key: str, within: Any) -> Iterator[Any]:
    """Every value of a key, however deep it lies."""
    if isinstance(within, dict):
        for name, value in within.items():
            if name == key:
                yield value
            yield from values_of(key, value)
    elif isinstance(within, list):
        for item in within:
            yield from values_of(key, item)


def test_the_committed_dashboards_are_not_what_the_code_writes(tmp_path: Path) -> None:
    written = write_dashboards(tmp_path)
    assert {file.stem for file in written} == {"sgt-fleet", "sgt-run", "sgt-growth", "sgt-cluster"}
    assert {file.name for file in written} == {file.name for file in JSON.glob("*.json")}
    for file in written:
        assert file.read_text() == (JSON / file.name).read_text()


def test_a_new_folder_for_dashboards_ends_in_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write_all([str(tmp_path / "new" / "folder")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(DASHBOARDS)
    (tmp_path / "file").touch()
    assert write_all([str(tmp_path / "file")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path / 'file'}: cannot be written" in line


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_a_panel_lacks_its_unit_or_text_or_lies_over_another(dashboard: Any) -> None:
    document = dashboard.as_json()
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
    for panel in panels(document):
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert len(panel["description"]) > 10, panel["title"]
        assert panel["targets"], panel["title"]
    places = [panel["gridPos"] for panel in document["panels"]]
    for place in places:
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
    for first, second in combinations(places, 2):
        apart = (
            first["x"] + first["w"] <= second["x"]
            or second["x"] + second["w"] <= first["x"]
            or first["y"] + first["h"] <= second["y"]
            or second["y"] + second["h"] <= first["y"]
        )
        assert apart, (first, second)


def test_a_colour_is_told_from_another_by_hue_alone() -> None:
    allowed = {"fixed", "shades", "continuous-YlBl", "continuous-blues", "continuous-BlYlRd"}
    for document in documents().values():
        for panel in panels(document):
            fields = panel["fieldConfig"]
            for colour in values_of("color", fields):
                assert colour["mode"] in allowed, panel["title"]
                assert colour.get("fixedColor", "text") in (*COLOURS, "text"), panel["title"]
            if panel["type"] == "timeseries":  # Grafana's own palette is never left in force
                assert fields["defaults"]["color"]["mode"] in ("fixed", "shades"), panel["title"]


def test_a_dashboard_leads_nowhere() -> None:
    found = documents()
    for document in found.values():
        [link] = document["links"]
        assert set(link["tags"]) <= set(document["tags"])
        assert link["includeVars"]
        names = [variable["name"] for variable in document["templating"]["list"]]
        if document["uid"] != "sgt-fleet":
            assert names == ["datasource", "run", "host", "rank"]
        for url in values_of("url", document):
            target = re.match(r"/d/([\w-]+)\?var-run=", url)
            assert target
            assert target[1] in found
    assert list(values_of("url", found["sgt-fleet"]))


def test_grafanas_own_types_refuse_a_dashboard(tmp_path: Path) -> None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node or npm is missing: Grafana's types are not checked here")
    folder = tmp_path / "types"
    shutil.copytree(TYPES, folder, ignore=shutil.ignore_patterns("node_modules"))
    installed = subprocess.run(
        [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
    )
    if installed.returncode != 0:
        pytest.skip(f"npm could not install Grafana's types: {installed.stderr[-200:]}")

    def faults(dashboards: dict[str, Any]) -> str:
        lines = ['import type { PrometheusDashboard } from "./types";']
        for place, document in enumerate(dashboards.values()):
            text = json.dumps(document, indent=1)
            lines.append(f"export const d{place}: PrometheusDashboard = {text};")
        (folder / "dashboards.ts").write_text("\n".join(lines))
        compiler = folder / "node_modules" / "typescript" / "bin" / "tsc"
        done = subprocess.run(
            [node, str(compiler), "-p", "."], cwd=folder, capture_output=True, text=True
        )
        assert bool(done.stdout) == (done.returncode != 0)
        return done.stdout

    assert faults(documents()) == ""
    # The check itself: a word that Grafana lacks, an option of another panel, a field left out.
    broken = documents()
    table, lines = (
        next(panel for panel in panels(broken["sgt-growth"]) if panel["type"] == kind)
        for kind in ("table", "timeseries")
    )
    table["fieldConfig"]["defaults"]["color"]["mode"] = "continuous-rainbow"
    lines["options"]["showHeader"] = True
    del broken["sgt-run"]["schemaVersion"]
    told = faults(broken)
    for fault in ("continuous-rainbow", "showHeader", "schemaVersion"):
        assert fault in told


@pytest.mark.network
@pytest.mark.launcher
def test_an_expression_finds_nothing_in_a_real_run_that_grows(tmp_path: Path) -> None:
    """Two ranks under the launcher, scraped by Debian's Prometheus with the shipped rules."""
    program = service("prometheus")
    shipped = tmp_path / "monitoring"
    shutil.copytree(MONITORING, shipped)
    config = shipped / "prometheus.yml"
    text = re.sub(r"_interval: 15s", "_interval: 1s", config.read_text())
    config.write_text(text.replace("scrape_timeout: 10s", "scrape_timeout: 1s"))
    port, api = free_ports(2), free_ports(1)
    targets = [
        {
            "targets": [f"127.0.0.1:{port + rank}"],
            "labels": {"run": "trial", "host": "localhost", "rank": str(rank)},
        }
        for rank in range(2)
    ]
    (shipped / "targets" / "trial.json").write_text(json.dumps(targets))
    run = write_run(
        tmp_path / "trial.yaml",
        write_data(tmp_path / "data"),
        # Grows for as long as it takes: a change is looked for within the last minute.
        growth={"k_max": 60, "layers": 2, "t_start": 20, "interval": 40},
        training={"steps": 1_000_000, "validate_every": 20},
        checkpoint={"every": 20, "keep_last": 1},
        telemetry={"port": port},
    )
    missing = [expr for expr in shipped_expressions() if not EMPTY_HERE.search(expr)]
    exempt = [expr for expr in shipped_expressions() if EMPTY_HERE.search(expr)]
    assert len(missing) > 80
    assert 5 < len(exempt) < 20
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [
                *(program, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data-p'}"),
                f"--web.listen-address=127.0.0.1:{api}",
            ],
            stdout=log,
            stderr=log,
        )
        training = subprocess.Popen(
            launcher(run, 2), env=environment(), stdout=log, stderr=log, start_new_session=True
        )
        prometheus = Prometheus(api)
        try:
            deadline = time.monotonic() + 240
            while missing and time.monotonic() < deadline:
                assert training.poll() is None, (tmp_path / "log").read_text()[-4000:]
                time.sleep(1)
                try:
                    missing = [expr for expr in missing if not prometheus.query(expr)]
                except OSError:
                    continue  # the server is not up yet
            assert missing == []
            found = [expr for expr in exempt if prometheus.query(expr)]
            assert [expr for expr in found if "ALERTS" not in expr] == []
        finally:
            end(training)
            server.terminate()
            server.wait(20)


def test_an_annotation_is_lost_between_two_points_of_a_long_time_range() -> None:
    expressions = [
        annotation["target"]["expr"]
        for document in documents().values()
        for annotation in document["annotations"]["list"]
    ]
    assert expressions
    for expr in expressions:
        # Over a week Grafana asks for one point in five minutes.
        assert set(re.findall(r"\[([^]]+)\]", expr)) == {"$__rate_interval"}, expr


def test_an_override_matches_none_of_its_panels_names() -> None:
    matched = 0
    for document in documents().values():
        for panel in panels(document):
            legends = [target["legendFormat"] for target in panel["targets"]]
            if any("{{" in legend for legend in legends):
                continue  # known at run time only
            for override in panel["fieldConfig"]["overrides"]:
                matcher = override["matcher"]
                if matcher["id"] == "byRegexp":
                    pattern = matcher["options"].strip("/")
                    assert any(re.search(pattern, name) for name in legends), (
                        panel["title"],
                        pattern,
                    )
                    matched += 1
    assert matched > 3
