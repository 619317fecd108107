"""The exporters' HTTP server: its port, clients that hang or crowd, what it costs training."""

from __future__ import annotations

import logging
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

import pytest
from exporters import INFO, TINY, Start, exporters, record, scrape, value

from sgt_ds.config import TelemetryConfig
from sgt_ds.errors import UserError
from sgt_ds.ports import free_ports
from sgt_ds.telemetry import Exporter


@pytest.fixture
def start() -> Iterator[Start]:
    with exporters() as start_one:
        yield start_one


def test_a_port_in_use_is_one_clear_error(start: Start) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is in use") as caught:
            start(TelemetryConfig(port=port - 1), local_rank=1)
        assert caught.value.field == "telemetry.port"
    with pytest.raises(UserError, match=r"telemetry\.host"):
        start(TelemetryConfig(host="192.0.2.1", port=free_ports()))
    with pytest.raises(UserError, match="exceeds 65535"):
        start(TelemetryConfig(port=65535), local_rank=1)


def test_close_releases_the_port(start: Start) -> None:
    config = TelemetryConfig(port=free_ports())
    for _ in range(2):
        exporter = start(config)
        scrape(exporter)
        exporter.close()
    with pytest.raises(urllib.error.URLError):
        scrape(exporter)


def test_only_metrics_and_health_are_served(start: Start) -> None:
    exporter = start()
    assert scrape(exporter, "/health") == "ok\n"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        scrape(exporter, "/")
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", data=b"x", timeout=5)
    with pytest.raises(ValueError, match="password"):
        Exporter(
            TelemetryConfig(),
            run_wide=True,
            local_rank=0,
            rank=0,
            info={**INFO, "password": "x"},
            model=TINY,
        )


def test_clients_that_hang_hold_up_neither_training_nor_others(start: Start) -> None:
    exporter = start()
    hanging = [socket.create_connection(("127.0.0.1", exporter.port)) for _ in range(50)]
    hanging[0].sendall(b"GET /metrics HTTP/1.1\r\n")  # and never the rest
    begun = time.perf_counter()
    for step in range(1, 1001):
        exporter.publish(record(step))
    assert time.perf_counter() - begun < 1.0
    assert value(exporter, "sgt_rank_step") == 1000
    begun = time.perf_counter()
    exporter.close()
    assert time.perf_counter() - begun < 2.0
    for connection in hanging:
        connection.close()


def test_a_hundred_scrapers_at_once_are_all_answered(start: Start) -> None:
    exporter = start()
    exporter.publish(record(7))
    answers: list[float] = []
    scrapers = [
        threading.Thread(target=lambda: answers.append(value(exporter, "sgt_rank_step")))
        for _ in range(100)
    ]
    for scraper in scrapers:
        scraper.start()
    for scraper in scrapers:
        scraper.join(30)
    assert answers == [7] * 100


def test_publishing_costs_no_more_than_a_thousandth_of_a_short_step(start: Start) -> None:
    exporter = start()
    value_of_step = record(1)
    rounds = []
    for _ in range(5):
        begun = time.thread_time()  # of this thread: other processes do not count
        for step in range(500):
            exporter.observe_step(step, 0.05, 1.0)
            exporter.publish(value_of_step)
        rounds.append((time.thread_time() - begun) / 500)
    assert min(rounds) < 0.001 * 0.05


def test_an_ipv6_address_can_be_served(start: Start) -> None:
    try:
        exporter = start(TelemetryConfig(host="::1", port=free_ports()))
    except UserError:
        pytest.skip("no IPv6 on this machine")
    with urllib.request.urlopen(f"http://[::1]:{exporter.port}/health", timeout=5) as answer:
        assert answer.read() == b"ok\n"


def test_an_exporter_whose_thread_died_says_so(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = start()
    logging.getLogger("sgt_ds").propagate = True
    assert exporter._server is not None
    exporter._server._server.shutdown()
    for step in range(1, 4):
        exporter.observe_step(step, 0.1)
    assert [r.message for r in caplog.records if "no longer served" in r.message] != []
    assert len(caplog.records) == 1


def test_a_target_left_over_by_another_run_reads_this_one(start: Start) -> None:
    exporter = start(info={"run": "zweiter lauf ü"})
    own, other = (urllib.parse.urlencode({"run": run}) for run in ("zweiter lauf ü", "first"))
    for query in ("", f"?{own}"):
        assert "sgt_rank_step" in scrape(exporter, f"/metrics{query}")
    with pytest.raises(urllib.error.HTTPError) as refused:
        scrape(exporter, f"/metrics?{other}")
    assert refused.value.code == 421
    assert refused.value.read().decode() == "this is run zweiter lauf ü\n"
