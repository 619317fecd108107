"""The files of a run directory that the trainer owns: run.yaml, metrics.jsonl, logs."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from sgt_ds.config import RunConfig, RunLayout, config_differences, dump_run_config, load_run_config
from sgt_ds.errors import UserError
from sgt_ds.files import write_text_atomically


def check_run_directory(config: RunConfig) -> bool:
    """Whether `run_dir` already holds this run.

    Raises: UserError where it holds another run, or where `resume: never` meets an existing one.
    """
    saved = RunLayout(config.run_dir).config
    if not saved.exists():
        if config.run_dir.exists() and not config.run_dir.is_dir():
            raise UserError(config.run_dir, "run_dir", "is a file; choose another run_dir")
        return False
    differences = config_differences(load_run_config(saved), config)
    if differences:
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        raise UserError(
            saved, differences[0], f"run_dir holds another run{more}; choose another run_dir"
        )
    if config.resume == "never":
        raise UserError(
            saved, "resume", "is never, but run_dir holds this run; remove it or resume"
        )
    return True


def prepare_run_directory(config: RunConfig) -> None:
    """Make the run directory and save the resolved configuration."""
    layout = RunLayout(config.run_dir)
    for folder in (layout.checkpoints, layout.logs, layout.stop_request.parent):
        folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(layout.config, dump_run_config(config))


def set_up_logging(run_dir: Path, rank: int) -> logging.Logger:
    """Log of this rank: a file of its own, and the terminal as well on rank 0."""
    logger = logging.getLogger("sgt_ds")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    to_file = logging.FileHandler(RunLayout(run_dir).logs / f"rank-{rank:05d}.log")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(to_file)
    to_terminal = logging.StreamHandler(sys.stdout)
    to_terminal.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    to_terminal.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(to_terminal)
    return logger


class MetricsFile:
    """metrics.jsonl: one JSON object a line, in order of steps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream = path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; it reaches the system before this returns."""
        self._stream.write(json.dumps(row) + "\n")
        self._stream.flush()

    def cut_back(self, step: int) -> None:
        """Drop every row past `step`, and a torn last line."""
        self._stream.close()
        kept = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                break
            if row["step"] <= step:
                kept.append(line + "\n")
        write_text_atomically(self._path, "".join(kept))
        self._stream = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Make the rows survive a power cut, and close the file."""
        os.fsync(self._stream.fileno())
        self._stream.close()
