"""The cost of telemetry to a training process: wall-clock and CPU time of scrapes, publishing.

One process trains a small model on random tokens while another one scrapes it. Rounds with and
without scrapes take turns, so that a machine that slows down slows both.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sgt_ds.config import ModelConfig, TelemetryConfig, TrainingConfig
from sgt_ds.model import Transformer
from sgt_ds.ports import free_ports
from sgt_ds.progress import Progress
from sgt_ds.telemetry import Exporter, HardwareSampler, full_record
from sgt_ds.training.parts import StepParts
from sgt_ds.training.timing import synchronize

# What monitoring/prometheus.yml ships.
SCRAPE_INTERVAL_SECONDS = 15.0
# Renderings are shared for 0.2 s: no faster, so that each scrape is rendered.
_BENCH_INTERVAL_SECONDS = 0.21
_PUBLICATIONS = 2000
_LOG_EVERY = TrainingConfig().log_every
# Reads "on" and "off" from its standard input; answers "off" with the scrapes since "on".
_SCRAPER = """
import sys, threading, time, urllib.request
url, interval = sys.argv[1], float(sys.argv[2])
on, idle, count = threading.Event(), threading.Event(), 0
idle.set()
def scrape():
    global count
    while True:
        on.wait()
        idle.clear()
        began = time.monotonic()
        request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
        count += 1
        idle.set()
        time.sleep(max(0.0, interval - (time.monotonic() - began)))
threading.Thread(target=scrape, daemon=True).start()
for line in sys.stdin:
    if line == "on\\n":
        count = 0
        on.set()
    else:
        on.clear()
        idle.wait()
        print(count, flush=True)
"""


@dataclass(frozen=True)
class ExporterBench:
    """One measurement. Ratios are shares of training's time."""

    device: str
    series: int
    """Of one scrape: a model of the given shape in which whole layers loop."""
    scrape_bytes: int
    step_seconds: float
    """Median, without scrapes."""
    rounds: int
    scrapes: int
    cpu_seconds_per_scrape: float
    """Of the training process, beside the thread that trains."""
    ratio_at_interval: float
    """CPU time of scrapes every `interval_seconds`, as if all of it were taken from training."""
    interval_seconds: float
    clock_ratio: float
    """Median over rounds: a step while scraped some five times a second over one that is not."""
    clock_ratio_quartiles: tuple[float, float]
    publish_seconds: float
    """Of one update: its parts timed, counted, and every tenth published as a logged one."""
    publish_ratio: float

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def bench_exporter(
    trained: ModelConfig,
    served: ModelConfig,
    *,
    device: torch.device,
    scrapes: int,
    rounds: int,
    micro_batch_size: int,
    sequence_length: int,
) -> ExporterBench:
    """Train `trained` while the series of `served` are scraped `scrapes` times in all, or more."""
    parts = StepParts(device, lambda part: None)
    step = _step_of(trained, device, (micro_batch_size, sequence_length + 1), parts)
    exporter = Exporter(
        TelemetryConfig(port=free_ports()),
        run_wide=True,
        local_rank=0,
        rank=0,
        info={"run": "bench"},
        model=served,
        hardware=HardwareSampler(None, None),
    )
    exporter.start()
    url = f"http://127.0.0.1:{exporter.port}/metrics"
    scraper = subprocess.Popen(
        [sys.executable, "-c", _SCRAPER, url, str(_BENCH_INTERVAL_SECONDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        publish_seconds = _time_publishing(exporter, parts, served)
        with urllib.request.urlopen(url, timeout=60) as answer:
            page = answer.read()
        for _ in range(3):
            step()
        measured = _rounds(step, scraper, scrapes=scrapes, rounds=rounds)
    finally:
        scraper.kill()
        scraper.wait()
        exporter.close()
    return _result(device, page, measured, publish_seconds)


@dataclass
class _Measured:
    """Seconds of a step in each round, and CPU seconds beside it; by whether it was scraped."""

    step_seconds: dict[bool, list[float]]
    cpu_seconds: dict[bool, float]
    scrapes: int = 0


def _rounds(
    step: Callable[[], None], scraper: subprocess.Popen[str], *, scrapes: int, rounds: int
) -> _Measured:
    """Train with and without scrapes in turn, until there were enough of them."""
    seconds = _BENCH_INTERVAL_SECONDS * scrapes / rounds
    measured = _Measured({False: [], True: []}, {False: 0.0, True: 0.0})
    with Progress("bench exporter", scrapes, "scrapes") as progress:
        while measured.scrapes < scrapes:
            for scraping in (False, True):
                _tell(scraper, "on" if scraping else "off")
                others = time.process_time() - time.thread_time()
                measured.step_seconds[scraping].append(_timed(step, seconds=seconds))
                found = _tell(scraper, "off") if scraping else 0
                own = time.process_time() - time.thread_time() - others
                measured.cpu_seconds[scraping] += own
                measured.scrapes += found
                # The turn without scrapes is half of the way to them.
                half = scrapes / rounds / 2
                progress.advance(found - half if scraping else half)
    return measured


def _result(
    device: torch.device, page: bytes, measured: _Measured, publish_seconds: float
) -> ExporterBench:
    alone, scraped = measured.step_seconds[False], measured.step_seconds[True]
    ratios = [own / base for own, base in zip(scraped, alone, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    step_seconds, cpu = statistics.median(alone), measured.cpu_seconds
    cpu_seconds = max(0.0, cpu[True] - cpu[False]) / measured.scrapes
    return ExporterBench(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        series=sum(not line.startswith(b"#") for line in page.splitlines()),
        scrape_bytes=len(page),
        step_seconds=step_seconds,
        rounds=len(ratios),
        scrapes=measured.scrapes,
        cpu_seconds_per_scrape=cpu_seconds,
        ratio_at_interval=cpu_seconds / SCRAPE_INTERVAL_SECONDS,
        interval_seconds=SCRAPE_INTERVAL_SECONDS,
        clock_ratio=statistics.median(ratios),
        clock_ratio_quartiles=(low, high),
        publish_seconds=publish_seconds,
        publish_ratio=publish_seconds / step_seconds,
    )


def _step_of(
    trained: ModelConfig, device: torch.device, shape: tuple[int, int], parts: StepParts
) -> Callable[[], None]:
    """What takes one optimizer step. `shape`: sequences, and tokens of each."""
    model = Transformer(trained).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = torch.randint(trained.vocab_size, shape, device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with parts.device("forward"):
            loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        with parts.device("backward"):
            loss.backward()
        with parts.device("optimizer"):
            optimizer.step()
        synchronize(device)
        parts.read_passed()

    return step


def _time_publishing(exporter: Exporter, parts: StepParts, served: ModelConfig) -> float:
    record = full_record(served.num_layers, served.num_heads)
    started = time.perf_counter()
    for step in range(_PUBLICATIONS):
        for part in ("forward", "backward", "reduce", "optimizer"):
            with parts.host(part):
                pass
        exporter.observe_step(step, 0.1, 0.0, part_seconds=parts.seconds(), collective_seconds=0.0)
        exporter.publish_totals(record.totals)
        if step % _LOG_EVERY == 0:
            exporter.publish_rank(
                part_seconds=parts.seconds(), collective_seconds=0.0, device_memory=None
            )
            exporter.publish(record)
    return (time.perf_counter() - started) / _PUBLICATIONS


def _timed(step: Any, *, seconds: float) -> float:
    """Mean seconds of a step, over as many as fit."""
    steps, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds:
        step()
        steps += 1
    return passed / steps


def _tell(scraper: subprocess.Popen[str], what: str) -> int:
    """Switch the scraper; for "off", how often it has scraped since "on"."""
    assert scraper.stdin is not None
    assert scraper.stdout is not None
    scraper.stdin.write(what + "\n")
    scraper.stdin.flush()
    return int(scraper.stdout.readline()) if what == "off" else 0
