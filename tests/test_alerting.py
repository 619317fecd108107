"""Who hears of an alert: the shipped Alertmanager example, run by Debian's Alertmanager."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest

CONFIG = Path(__file__).parent.parent / "monitoring" / "alertmanager.yml"
Message = tuple[str, dict[str, Any]]

pytestmark = pytest.mark.network


def program(*names: str) -> str:
    for name in names:
        if path := shutil.which(name):
            return path
    pytest.skip(f"{names[0]} is missing; run tests/install_services.sh")


@pytest.mark.parametrize(
    ("severity", "receiver"), [("page", "pager"), ("warning", "chat"), ("info", "followers")]
)
def test_an_alert_reaches_the_wrong_people(severity: str, receiver: str) -> None:
    amtool = program("amtool")
    test = [amtool, "config", "routes", "test", f"--config.file={CONFIG}"]
    done = subprocess.run(
        [*test, f"--verify.receivers={receiver}", f"severity={severity}", "run=r"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        subprocess.run([amtool, "check-config", str(CONFIG)], capture_output=True).returncode == 0
    )


def test_the_documented_check_asks_an_alertmanager_that_does_not_run() -> None:
    root = CONFIG.parents[1]
    text = (root / "docs" / "monitoring.md").read_text() + CONFIG.read_text()
    commands = set(re.findall(r"^(?:#  |   ) *(amtool .*)", text, re.M))
    assert len(commands) == 2, "the same in both"
    for command in commands:
        _, *words = command.split()
        done = subprocess.run(
            [program("amtool"), *words], cwd=root, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "routes" not in words or done.stdout == "pager\n"


@pytest.fixture
def alertmanager(tmp_path: Path) -> Iterator[tuple[str, Queue[Message]]]:
    """The address of an Alertmanager with the shipped example, and what its receivers get."""
    received: Queue[Message] = Queue()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.put((self.path, json.loads(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    receiver = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    text = CONFIG.read_text().replace(":8060", f":{receiver.server_port}")
    text = text.replace("group_wait: 30s", "group_wait: 1s").replace(
        "group_wait: 10s", "group_wait: 1s"
    )
    (tmp_path / "alertmanager.yml").write_text(text)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [
                program("alertmanager", "prometheus-alertmanager"),
                f"--config.file={tmp_path / 'alertmanager.yml'}",
                f"--storage.path={tmp_path / 'data'}",
                f"--web.listen-address={address}",
                "--cluster.listen-address=",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            deadline = time.monotonic() + 60
            while not answers(f"http://{address}/-/ready"):
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.1)
            # It forgets what it told after five days: a longer repeat_interval has no effect.
            assert "data retention period" not in (tmp_path / "log").read_text()
            yield address, received
        finally:
            process.terminate()
            process.wait(20)
            receiver.shutdown()
            receiver.server_close()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def test_a_dead_run_pages_for_each_of_its_ranks(alertmanager: tuple[str, Queue[Message]]) -> None:
    address, received = alertmanager
    now = datetime.now(timezone.utc).isoformat()

    def alert(name: str, severity: str, run: str, **labels: str) -> dict[str, Any]:
        labels = {"alertname": name, "severity": severity, "run": run, **labels}
        return {"labels": labels, "startsAt": now}

    ranks = [
        alert(name, "warning", "dead", rank=str(rank), host="h")
        for rank in range(8)
        for name in ("SgtRankLate", "SgtDataStarvation")
    ]
    alerts = [
        alert("SgtRunDown", "page", "dead"),
        *ranks,
        alert("SgtLossSpike", "warning", "other", rank="0"),
    ]
    request = urllib.request.Request(
        f"http://{address}/api/v2/alerts",
        data=json.dumps(alerts).encode(),
        headers={"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=10).close()
    assert {received.get(timeout=60)[0] for _ in range(2)} == {"/page", "/chat"}
    # What the dead run explains is told nobody, and would have come with the other run's warning.
    with pytest.raises(Empty):
        received.get(timeout=3)
    with urllib.request.urlopen(f"http://{address}/api/v2/alerts", timeout=10) as answer:
        states = {
            (a["labels"]["alertname"], a["labels"]["run"]): a["status"]["state"]
            for a in json.load(answer)
        }
    assert states == {
        ("SgtRunDown", "dead"): "active",
        ("SgtRankLate", "dead"): "suppressed",
        ("SgtDataStarvation", "dead"): "suppressed",
        ("SgtLossSpike", "other"): "active",
    }
