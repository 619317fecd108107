"""How long a run that ended stays up for those who scrape it, and for whom."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from exporters import Start, exporters

from sgt_ds.launch.run_bench import _Scraper
from sgt_ds.telemetry import Exporter
from sgt_ds.telemetry.scrapers import Scrapers
from sgt_ds.training.trainer import LAST_SCRAPE_SECONDS

MONITORING = Path(__file__).parent.parent / "monitoring"


@pytest.fixture
def start() -> Iterator[Start]:
    with exporters() as starts:
        yield starts


def scrape(exporter: Exporter, *, timeout: str | None = "10", agent: str = "Prometheus/3.0") -> str:
    """What a scraper gets; one that names no timeout is no Prometheus."""
    headers = {"User-Agent": agent}
    if timeout is not None:
        headers["X-Prometheus-Scrape-Timeout-Seconds"] = timeout
    url = f"http://127.0.0.1:{exporter.port}/metrics"
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=5) as answer:
        return str(answer.read().decode())


def later(seconds: float, exporter: Exporter, told: list[str], *, agent: str) -> threading.Thread:
    """A scrape in a while, in another thread."""

    def read() -> None:
        time.sleep(seconds)
        told.append(scrape(exporter, agent=agent))

    thread = threading.Thread(target=read)
    thread.start()
    return thread


@pytest.mark.parametrize("interval", ["prometheus.yml", "prometheus-agent.yml"])
def test_a_run_ends_between_two_scrapes_of_the_shipped_configuration(interval: str) -> None:
    config = yaml.safe_load((MONITORING / interval).read_text())
    seconds = float(config["global"]["scrape_interval"].removesuffix("s"))
    for end in ("completed", "stopped"):
        assert LAST_SCRAPE_SECONDS[end] > 2 * seconds


def test_who_only_looks_on_keeps_prometheus_from_reading_the_end(start: Start) -> None:
    exporter = start()
    scrape(exporter)
    exporter.finish("stopped")
    scrape(exporter, timeout=None, agent="sgt-ds top")
    told: list[str] = []
    thread = later(0.5, exporter, told, agent="Prometheus/3.0")
    exporter.close(wait_seconds=10)
    thread.join()
    assert 'sgt_run_state{state="stopped"} 1' in told[0]


def test_the_second_of_two_scrapers_misses_the_end(start: Start) -> None:
    exporter = start()
    for agent in ("Prometheus/3.0", "Prometheus/3.1"):
        scrape(exporter, agent=agent)
    exporter.finish("completed")
    told: list[str] = []
    threads = [
        later(0.2, exporter, told, agent="Prometheus/3.0"),
        later(0.9, exporter, told, agent="Prometheus/3.1"),
    ]
    exporter.close(wait_seconds=10)
    for thread in threads:
        thread.join()
    assert len(told) == 2
    assert all('sgt_run_state{state="completed"} 1' in text for text in told)


def test_a_scraper_that_is_gone_holds_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgt_ds.telemetry.scrapers.LATE_BY_SECONDS", 0.1)
    scrapers = Scrapers()
    began = time.monotonic()
    scrapers.wait(10)  # no one ever scraped
    for _ in range(3):
        scrapers.served("gone", the_end=False)
        time.sleep(0.2)
    scrapers.wait(10)
    assert time.monotonic() - began < 5


def test_a_benchmark_misses_the_end_of_the_run_that_it_measures(start: Start) -> None:
    exporter = start()
    with _Scraper([exporter.port], warm_up_steps=0) as scraper:
        while exporter.port not in scraper.last:
            time.sleep(0.01)
        exporter.observe_step(1, 0.5)
        exporter.finish("completed")
        exporter.close(wait_seconds=10)
    assert scraper.last[exporter.port]["sgt_run_state", (("state", "completed"),)] == 1
