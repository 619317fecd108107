"""Exporters started for tests, what they are given, and what they answer."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sgt_ds.config import PRESETS, TelemetryConfig
from sgt_ds.growth import Loop, State
from sgt_ds.ports import free_ports
from sgt_ds.telemetry import Exporter, StepRecord
from sgt_ds.telemetry.exporter import RENDERING_LASTS_SECONDS
from sgt_ds.telemetry.metric import INFO_LABELS

TINY = PRESETS["tiny"]
INFO = dict.fromkeys(INFO_LABELS, "x") | {"run": "r", "method": "sgt"}
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]
Start = Callable[..., Exporter]


@contextmanager
def exporters() -> Iterator[Start]:
    """Starts exporters: a configuration, and what else differs. All are closed at the end."""
    with ExitStack() as started:

        def start_one(config: TelemetryConfig | None = None, **changes: Any) -> Exporter:
            settings: dict[str, Any] = {
                "run_wide": True,
                "local_rank": 0,
                "rank": 0,
                "info": INFO,
                "model": TINY,
                **changes,
            }
            exporter = Exporter(config or TelemetryConfig(port=free_ports()), **settings)
            exporter.start()
            started.callback(exporter.close)
            return exporter

        yield start_one


def scrape(exporter: Exporter, path: str = "/metrics") -> str:
    time.sleep(RENDERING_LASTS_SECONDS)  # past the rendering that a former scrape left
    url = f"http://127.0.0.1:{exporter.port}{path}"
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def series(text: str) -> Series:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(exporter: Exporter, name: str, **labels: str) -> float:
    return series(scrape(exporter))[name, tuple(sorted(labels.items()))]


def looping(layer: int, depth: int = 1) -> State:
    loop = Loop(depth=depth, heads=(1, 3), scope="attention", step=4, entered=4)
    return State({layer: loop}, layer)


def record(step: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": step,
        "tokens": step * 1000,
        "loss": 3.5,
        "learning_rate": 1e-3,
        "grad_norm": 0.7,
        "step_seconds": 0.4,
        "tokens_per_second": 2500.0,
        "flops": step * 11_000_000,
        "vanilla_flops": step * 10_000_000,
        "overhead_ratio": 0.1,
        "flops_per_token": 11_000,
        "mfu_ratio": None,
        "data_wait_seconds": 0.5,
        "skipped_steps": 0,
        "phase": "growing",
        "loops": State(),
        "entropy": [[0.25, 0.5, 0.75, 0.5]] * TINY.num_layers,
        "layer_stderr": [0.01] * TINY.num_layers,
        **changes,
    }
    return StepRecord(**values)
