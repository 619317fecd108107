"""Pushing where nobody can scrape: the shipped agent's config, from a real agent to a real receiver."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from sgt_ds.config import PRESETS, TelemetryConfig
from sgt_ds.ports import free_ports
from sgt_ds.telemetry import Exporter, targets

MONITORING = Path(__file__).parent.parent / "monitoring"


@contextmanager
def running(folder: Path, name: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is missing; run tests/install_services.sh")
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen([program, *options], stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.network
def test_an_agent_pushes_nothing_to_where_the_rules_are(tmp_path: Path) -> None:
    shipped = tmp_path / "monitoring"
    shutil.copytree(MONITORING, shipped)
    receiver, agent = free_ports(2), free_ports(3) + 2
    config = shipped / "prometheus-agent.yml"
    text = config.read_text().replace("scrape_interval: 15s", "scrape_interval: 1s")
    text = text.replace("scrape_timeout: 10s", "scrape_timeout: 1s")
    assert "127.0.0.1:9090/api/v1/write" in text
    config.write_text(text.replace("127.0.0.1:9090", f"127.0.0.1:{receiver}"))
    (tmp_path / "receiver.yml").write_text("{}\n")
    port = free_ports()
    groups = targets([("127.0.0.1", 1)], run="pushed", port=port)
    (shipped / "targets" / "pushed.json").write_text(json.dumps(groups))
    exporter = Exporter(
        TelemetryConfig(port=port),
        run_wide=True,
        local_rank=0,
        rank=0,
        info={"run": "pushed"},
        model=PRESETS["tiny"],
    )
    exporter.start()
    with ExitStack() as held:
        held.callback(exporter.close)
        processes = [
            held.enter_context(
                running(
                    tmp_path,
                    "receiver",
                    f"--config.file={tmp_path / 'receiver.yml'}",
                    f"--storage.tsdb.path={tmp_path / 'tsdb'}",
                    f"--web.listen-address=127.0.0.1:{receiver}",
                    "--web.enable-remote-write-receiver",
                )
            ),
            held.enter_context(
                running(
                    tmp_path,
                    "agent",
                    "--enable-feature=agent",
                    f"--config.file={config}",
                    f"--storage.agent.path={tmp_path / 'wal'}",
                    f"--web.listen-address=127.0.0.1:{agent}",
                )
            ),
        ]
        query = f"http://127.0.0.1:{receiver}/api/v1/query?query=sgt_rank_step"
        deadline = time.monotonic() + 120
        found: list[dict[str, dict[str, str]]] = []
        while not found:
            assert all(process.poll() is None for process in processes)
            assert time.monotonic() < deadline, (tmp_path / "agent.log").read_text()
            time.sleep(0.3)
            try:
                with urllib.request.urlopen(query, timeout=10) as answer:
                    found = json.load(answer)["data"]["result"]
            except OSError:
                continue
    [series] = found
    assert series["metric"]["run"] == "pushed"
    assert series["metric"]["rank"] == "0"
