"""Paths within a run directory: the only place that knows the names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunLayout:
    """Paths inside one run directory."""

    run_dir: Path

    @property
    def config(self) -> Path:
        """Resolved run configuration."""
        return self.run_dir / "run.yaml"

    @property
    def journal(self) -> Path:
        """Growth journal, JSON Lines."""
        return self.run_dir / "growth.jsonl"

    @property
    def metrics(self) -> Path:
        """Metrics by step, JSON Lines."""
        return self.run_dir / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints, one directory per step."""
        return self.run_dir / "checkpoints"

    @property
    def evaluations(self) -> Path:
        """Item results of evaluations in the loop, one file per step."""
        return self.run_dir / "evaluations"

    def is_there(self) -> bool:
        """Whether a start was made here, however it ended."""
        return self._is_marked() or (self.config.exists() and self.checkpoints.is_dir())

    def has_begun(self) -> bool:
        """Whether anything was trained here: a row of metrics or a checkpoint is there."""
        rows = self.metrics.exists() and self.metrics.stat().st_size > 0
        return rows or self.has_checkpoints()

    def has_checkpoints(self) -> bool:
        """Whether any checkpoint lies here, whole or not."""
        return self.newest_checkpoint() is not None

    def newest_checkpoint(self) -> Path | None:
        """The one of the highest step, whole or not; None where there is none."""
        return max(self.checkpoints.glob("step-*"), default=None)

    def strangers(self) -> list[Path]:
        """What is there and no run wrote, sorted; nothing where a start was made here.

        What a job leaves before it starts is no stranger: hidden files, logs that a shell or Slurm
        sends here, folders with nothing else in them. Raises: OSError where it cannot be read.
        """
        if not self.run_dir.is_dir() or self._is_a_runs():
            return []
        entries = [each for each in sorted(self.run_dir.iterdir()) if not _is_left_by_a_job(each)]
        # Another rank of this very start may have begun it meanwhile.
        return [] if self._is_a_runs() else entries

    def _is_a_runs(self) -> bool:
        """Whether nothing that is there is a stranger; a run.yaml alone may be the user's own."""
        prepared = self.control.is_dir() and self.checkpoints.is_dir()
        return self._is_marked() or (self.config.exists() and (prepared or self.has_begun()))

    def _is_marked(self) -> bool:
        """Whether it holds what each start makes first. A folder `control` may be anybody's."""
        locks = (self.supervisor_lock, self.training_lock)
        return (self.control / "ranks").is_dir() or any(lock.is_file() for lock in locks)

    @property
    def control(self) -> Path:
        """Requests, locks and what is told of the processes that train."""
        return self.run_dir / "control"

    @property
    def logs(self) -> Path:
        """Log files, one a rank."""
        return self.run_dir / "logs"

    @property
    def starts(self) -> Path:
        """One line for each start of the run: when, where, with what software. JSON Lines."""
        return self.logs / "starts.jsonl"

    @property
    def targets(self) -> Path:
        """Where the ranks' exporters are since the newest start, for Prometheus' file_sd."""
        return self.run_dir / "targets.json"

    @property
    def tensorboard(self) -> Path:
        """Event files of TensorBoard."""
        return self.run_dir / "tensorboard"

    @property
    def wandb(self) -> Path:
        """Files of Weights & Biases."""
        return self.run_dir / "wandb"

    @property
    def exporter_counters(self) -> Path:
        """Where the exported counters stand as scrapers last saw them."""
        return self.control / "counters.json"

    @property
    def training_lock(self) -> Path:
        """Held by global rank 0 for as long as it trains."""
        return self.control / "training.lock"

    @property
    def supervisor_lock(self) -> Path:
        """Held by the process that supervises the run."""
        return self.control / "lock"

    @property
    def set_aside(self) -> Path:
        """What rollbacks took away: one folder each, laid out as a run directory."""
        return self.run_dir / "set-aside"

    def signs_of_life(self, launch: str) -> Path:
        """Where the ranks of one launch tell where they stand."""
        return self.control / "ranks" / launch

    @property
    def stop_request(self) -> Path:
        """While this file is there, ranks save and end after the update in progress."""
        return self.control / "stop"

    @property
    def freeze_request(self) -> Path:
        """While this file is there, growth decides nothing any more."""
        return self.control / "freeze"


def _is_left_by_a_job(path: Path) -> bool:
    if path.name.startswith(".") or path.name == "lost+found":
        return True
    if path.is_dir() and not path.is_symlink():
        return all(_is_left_by_a_job(entry) for entry in path.iterdir())
    return path.suffix in (".log", ".out", ".err") or (path.suffix == ".txt" and "log" in path.stem)
