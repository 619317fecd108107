"""Each start of a run: when, where, with what software. One line per process start.

Knows the process and its libraries; no training, no report.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sgt_ds import __version__
from sgt_ds.config import RunConfig, RunLayout
from sgt_ds.telemetry import remove_outcome
from sgt_ds.training.engine import Ranks

# What decides the numbers; a report tells them.
LIBRARIES = ("deepspeed", "numpy", "transformers")


def reached_step(metrics: Path) -> int | None:
    """The newest step in metrics.jsonl before a resume cuts it back; None where there is none."""
    try:
        with metrics.open("rb") as stream:
            stream.seek(-min(metrics.stat().st_size, 1 << 16), os.SEEK_END)
            lines = stream.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):  # the last one may be torn
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        return step if isinstance(step, int) else None
    return None


def note_start(
    config: RunConfig, ranks: Ranks, step: int, reached: int | None, load_seconds: float | None
) -> None:
    """Append this start to the run's record, and take away how the last one ended.

    `step`: where it continues; `reached`: how far the run had come; `load_seconds`: what its
    checkpoint took to load. A record that cannot be written stops no training: it is for people
    who read of the run later.
    """
    start = {"step": step, "reached": reached, "load_seconds": load_seconds}
    line = json.dumps({**start, **_environment(config, ranks)}) + "\n"
    try:
        remove_outcome(RunLayout(config.run_dir).control)
        with RunLayout(config.run_dir).starts.open("a", encoding="utf-8") as stream:
            stream.write(line)
    except OSError:
        return


def _environment(config: RunConfig, ranks: Ranks) -> dict[str, Any]:
    on_gpu = ranks.device.type == "cuda"
    return {
        "time": round(time.time(), 3),
        "world_size": ranks.world_size,
        "micro_batch_size": config.training.micro_batch_size,
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(ranks.device) if on_gpu else _processor(),
        "deepspeed_config": str(config.deepspeed),
        "fp8": config.training.fp8,
        "software": {
            "sgt-ds": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **({"cuda": torch.version.cuda} if on_gpu else {}),
            **{name: found for name in LIBRARIES if (found := _version(name))},
            "system": platform.platform(),
        },
    }


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's name as Linux tells it, with the threads that torch may use."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        names = [line.partition(":")[2] for line in text.splitlines() if "model name" in line]
    except OSError:
        names = []
    name = names[0].strip() if names else platform.machine()
    threads = torch.get_num_threads()
    return f"{name} (CPU, {threads} thread{'s' if threads > 1 else ''} per rank)"
