"""Step 3 and 4 of the demo: the launcher's command, its lines, and scrapes while it trains."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

from sgt_ds.config import RunConfig, RunLayout
from sgt_ds.demo.console import Console
from sgt_ds.demo.processes import CommandFailed, Interrupted, Running, program
from sgt_ds.demo.settings import MASTER_PORT, RANKS, Settings
from sgt_ds.demo.watch import Scrape, scrape
from sgt_ds.ports import free_ports

SCRAPE_EVERY_SECONDS = 15.0
STOP_SECONDS = 30.0
_PROGRESS = re.compile(r"step \d+/\d+ ")
_EVENT = re.compile(r"step \d+: ")


def train(console: Console, settings: Settings, config: RunConfig) -> Scrape | None:
    """Start or resume the run and follow it to its end. Returns the last scrape.

    Raises: CommandFailed with the launcher's exit status. On an interruption the ranks are asked
    to save first.
    """
    telemetry = config.telemetry
    port = free_ports(RANKS, host=telemetry.host, first=telemetry.port)
    overrides = settings.overrides()
    if port != telemetry.port:
        console.note(f"port {telemetry.port} or its neighbour is in use: the exporters take {port}")
        overrides.append(f"telemetry.port={port}")
    launcher = [program("deepspeed"), "--num_gpus", str(RANKS)]
    if (master := free_ports(first=MASTER_PORT)) != MASTER_PORT:
        launcher += ["--master_port", str(master)]
    argv = [*launcher, "--module", "sgt_ds.train", str(settings.run_yaml), *overrides]
    # Each rank takes its share of the cores; two pools of all cores would fight over them.
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // RANKS))}
    console.command(argv, environment)
    log = settings.logs / "train.log"
    console.note(f"all of its output: {log}")
    layout = RunLayout(config.run_dir)
    last: Scrape | None = None
    with Running(argv, environment, log) as command:
        try:
            last = _follow(console, command, telemetry.host, [port + rank for rank in range(RANKS)])
        except (Interrupted, KeyboardInterrupt):
            console.line("  interrupted: asking the ranks to save and end")
            layout.stop_request.parent.mkdir(parents=True, exist_ok=True)
            layout.stop_request.touch()
            until = time.monotonic() + STOP_SECONDS
            while (line := command.next_line(1.0)) is not None and time.monotonic() < until:
                if _EVENT.match(line):
                    console.note(line)
            raise
        code = command.wait()
    if code:
        ours = [line for line in command.stderr if line.startswith("sgt-ds ")]
        raise CommandFailed((ours or [f"training failed; its output is in {log}"])[-1], code)
    return last


def rows(metrics: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training rows and validation rows of a metrics.jsonl, in order of steps."""
    training: list[dict[str, Any]] = []
    validation: list[dict[str, Any]] = []
    for line in metrics.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        (validation if "validation_loss" in row else training).append(row)
    return training, validation


def _follow(console: Console, command: Running, host: str, ports: list[int]) -> Scrape | None:
    last: Scrape | None = None
    due = time.monotonic() + SCRAPE_EVERY_SECONDS
    while (line := command.next_line(1.0)) is not None:
        if _PROGRESS.match(line):
            console.progress(line)
        elif _EVENT.match(line) or line.startswith(("resum", "start")):
            console.note(line)
        if time.monotonic() >= due:
            due = time.monotonic() + SCRAPE_EVERY_SECONDS
            if (seen := scrape(host, ports)) is not None:
                last = seen
                console.note(f"[4/6] scraped {seen}")
    return last
