"""Kills training runs at chosen moments and holds every resume to the run that was left alone.

    python tests/training_storm.py --kills 100 --seed 0

For one rank and for two, a run is trained once without a kill. Then runs of the same configuration
are killed with SIGKILL again and again until they are complete, each kill aimed at a moment that
the seed chooses: a save, a decision of growth, a validation, the rotation that follows a save, or a
conversion of a checkpoint. With two ranks a kill hits both or one of them. After each kill no whole
checkpoint may be damaged or missing, and every loss on the disk must be that of the undisturbed run
at the same step, to the last bit; at the end journal, validation losses, weights and optimizer too.

Exit status 0 only where all of it held.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import runs
import torch
from forked import Nursery, Ranks

from sgt_ds.checkpoints import (
    list_checkpoints,
    load_payload,
    newest_good,
    read_latest,
    read_manifest,
    verify,
)

STEPS, EVERY, KEEP_LAST, KEEP_EVERY, INTERVAL = 60, 3, 2, 12, 9
PHASES = ("save", "growth", "validation", "rotation", "conversion")
CONVERT = "sgt_ds.cli:main"


class Parted(AssertionError):
    """A killed run and the undisturbed one are not the same."""


def same(left: Any, right: Any) -> bool:
    """Whether two contents of a checkpoint's file hold the same numbers, to the last bit."""
    if torch.is_tensor(left):
        return torch.is_tensor(right) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and (left == right or not _is_plain(left))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of an export but its card, which tells the path that it came from."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.suffix == ".safetensors"
    }


class Storm:
    """Runs under kills, of one number of ranks."""

    def __init__(self, nursery: Nursery, root: Path, ranks: int, seed: int) -> None:
        self.nursery, self.root, self.ranks = nursery, root, ranks
        self.draw = random.Random(f"{seed}-{ranks}")
        self.kills: Counter[str] = Counter()
        self.resumed = self.completed = 0
        root.mkdir(parents=True)
        self.data = runs.write_data(root / "data")
        self.reference = self._new_run("reference")
        self._start(self.reference).end()
        self.losses = runs.losses(self.reference)
        self.validation = self._validation(self.reference)
        converted = nursery.start(
            root / "convert.log",
            ["convert", self.reference, "--out", root / "export", "--dtype", "fp32"],
            entry=CONVERT,
        )
        converted.end()
        self.export = digests(root / "export")

    def run(self, kills: int, phases: tuple[str, ...] = PHASES) -> None:
        """Kill until there were so many kills, and let the last run end. Raises: Parted."""
        number = 0
        while self.kills.total() < kills:
            run_dir = self._new_run(f"run-{number}")
            number += 1
            while True:
                before = self._whole_steps(run_dir)
                ranks = self._start(run_dir)
                phase = self.draw.choice(phases)
                hit = self.kills.total() < kills and self._kill_in(phase, run_dir, ranks)
                if not hit:
                    ranks.end()
                    break
                self.kills[phase] += 1
                self._check(run_dir, before)
                self.resumed += 1
            self._compare_the_end(run_dir)
            self.completed += 1
            shutil.rmtree(run_dir)

    def _new_run(self, name: str) -> Path:
        file = runs.write_run(
            self.root / f"{name}.yaml",
            self.data,
            growth={"t_start": 5, "interval": INTERVAL},
            training={"steps": STEPS, "validate_every": 4, "micro_batch_size": 4},
            checkpoint={
                "every": EVERY,
                "keep_last": KEEP_LAST,
                "keep_every": KEEP_EVERY,
                "keep_best": True,
            },
            telemetry={"enabled": False},
        )
        return file.with_suffix("")

    def _start(self, run_dir: Path) -> Ranks:
        log = run_dir.with_suffix(".log")
        return self.nursery.start(log, [run_dir.with_suffix(".yaml")], ranks=self.ranks)

    def _kill_in(self, phase: str, run_dir: Path, ranks: Ranks) -> bool:
        """Wait for a moment of `phase`, and kill. Whether the run was alive until then."""
        if phase == "conversion":
            return self._kill_conversion(run_dir, ranks)
        moment, longest_delay = self._moment(phase, run_dir)
        skipped = self.draw.randrange(3)
        delay = self.draw.uniform(0, longest_delay)
        for _ in range(skipped + 1):
            if not self._until(moment, ranks):
                return False
        time.sleep(delay)
        return self._kill(ranks)

    def _kill(self, ranks: Ranks) -> bool:
        one_only = self.ranks > 1 and self.draw.random() < 0.4
        victim = self.draw.choice(ranks.pids)
        if not ranks.is_running():
            return False
        if one_only and victim not in ranks.ended:
            os.kill(victim, signal.SIGKILL)
            statuses = ranks.statuses()  # the others end by themselves
            if all(status != -signal.SIGKILL for status in statuses):
                return False
        else:
            ranks.kill()
        return True

    def _moment(self, phase: str, run_dir: Path) -> tuple[Callable[[], object], float]:
        """What changes when a moment of `phase` begins, and how long it may last, in seconds."""
        checkpoints = run_dir / "checkpoints"
        if phase == "save":
            return lambda: [path.name for path in checkpoints.glob(".step-*.partial")], 0.06
        if phase == "rotation":
            return lambda: read_latest(checkpoints), 0.01
        if phase == "growth":
            return lambda: self._rows(run_dir) // INTERVAL, 0.05
        return lambda: self._rows(run_dir) // EVERY, 0.06  # every save is validated

    def _rows(self, run_dir: Path) -> int:
        """The newest step that was reported, and one more: growth and validation come next."""
        try:
            rows = (run_dir / "metrics.jsonl").read_bytes().splitlines()
            return int(json.loads(rows[-1])["step"]) + 1
        except (OSError, IndexError, ValueError):
            return 0

    def _until(self, moment: Callable[[], object], ranks: Ranks) -> bool:
        """Wait until what `moment` gives changes to something else than nothing."""
        before, looked = moment(), 0
        while True:
            now = moment()
            if now != before and now:
                return True
            before, looked = now, looked + 1
            if looked % 100 == 0 and not ranks.is_running():
                return False
            time.sleep(0.001)

    def _kill_conversion(self, run_dir: Path, ranks: Ranks) -> bool:
        """Kill a conversion beside the run, convert again, and kill the run as well."""
        out = self.root / "out"
        for leftover in self.root.glob(".out*"):
            shutil.rmtree(leftover)
        arguments = ["convert", self.reference, "--out", out, "--dtype", "fp32"]
        log = self.root / "convert.log"
        conversion = self.nursery.start(log, arguments, entry=CONVERT)
        begun = time.monotonic()
        while not list(self.root.glob(".out*")) and time.monotonic() < begun + 5:
            if not conversion.is_running():
                break
            time.sleep(0.001)
        time.sleep(self.draw.uniform(0, 0.1))
        conversion.kill()
        if out.exists():
            if digests(out) != self.export:
                raise Parted("a killed conversion left half an export under its name")
        else:
            self.nursery.start(log, arguments, entry=CONVERT).end()
            if digests(out) != self.export:
                raise Parted("the conversion after a killed one gave other weights")
        shutil.rmtree(out)
        return self._kill(ranks)

    def _whole_steps(self, run_dir: Path) -> set[int]:
        directory = run_dir / "checkpoints"
        if not directory.is_dir():
            return set()
        return {info.step for info in list_checkpoints(directory) if info.fault is None}

    def _check(self, run_dir: Path, before: set[int]) -> None:
        """What must hold after every kill."""
        directory = run_dir / "checkpoints"
        found = self._whole_steps(run_dir)
        for step in found:
            if faults := verify(directory / f"step-{step:08d}"):
                raise Parted(f"step {step} looks whole and is not: {faults}")
        newest = max(found, default=0)
        if newest < max(before, default=0):
            raise Parted(f"went back from {sorted(before)} to {sorted(found)}")
        if directory.is_dir():
            good = newest_good(directory)
            if (good.step if good else 0) != newest:
                raise Parted(f"{good} is not the newest of {sorted(found)}")
        saved = range(EVERY, newest + 1, EVERY)
        wanted = set(saved[-KEEP_LAST:]) | {step for step in saved if step % KEEP_EVERY == 0}
        if saved:
            wanted.add(min(saved, key=lambda step: (self.validation[step], -step)))
        if missing := wanted - found:
            raise Parted(f"steps {sorted(missing)} are lost; {sorted(found)} are left")
        self._compare_losses(run_dir)

    def _compare_losses(self, run_dir: Path) -> None:
        for step, loss in runs.losses(run_dir).items():
            if loss != self.losses[step]:
                raise Parted(f"loss of step {step}: {loss!r}, undisturbed {self.losses[step]!r}")
        for step, loss in self._validation(run_dir).items():
            if loss != self.validation[step]:
                raise Parted(f"validation loss of step {step} parted")

    def _validation(self, run_dir: Path) -> dict[int, float]:
        rows = runs.metrics(run_dir)
        return {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}

    def _compare_the_end(self, run_dir: Path) -> None:
        self._compare_losses(run_dir)
        if runs.last_step(run_dir) != STEPS or len(runs.losses(run_dir)) != STEPS:
            raise Parted("rows are missing from metrics.jsonl")
        if runs.journal_lines(run_dir) != runs.journal_lines(self.reference):
            raise Parted("the journals part")
        if self._whole_steps(run_dir) != self._whole_steps(self.reference):
            raise Parted("other checkpoints are left")
        for step in self._whole_steps(run_dir):
            here, there = (
                directory / "checkpoints" / f"step-{step:08d}"
                for directory in (run_dir, self.reference)
            )
            for name in read_manifest(here).files:
                if name.endswith(".pt") and not same(
                    load_payload(here / name), load_payload(there / name)
                ):
                    raise Parted(f"step {step}: {name} holds other numbers")


def main() -> int:
    """Run the storm and print what it did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2], help="the kills are shared among these"
    )
    parser.add_argument("--scratch", type=Path, help="where runs are written (default: /tmp)")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="training-storm-", dir=options.scratch))
    started, status = time.monotonic(), 0
    with Nursery() as nursery:
        for number, ranks in enumerate(options.ranks):
            storm = Storm(nursery, root / str(ranks), ranks, options.seed)
            share = (options.kills + number) // len(options.ranks)
            try:
                storm.run(share)
            except Parted as error:
                print(f"PARTED with {ranks} ranks: {error}; see {storm.root}", flush=True)
                status = 1
            print(
                f"{ranks} ranks: {storm.kills.total()} kills {dict(sorted(storm.kills.items()))}, "
                f"{storm.resumed} resumes, {storm.completed} runs to their end",
                flush=True,
            )
    if status == 0:
        shutil.rmtree(root)
    verdict = "every resume equals the undisturbed run" if status == 0 else "PARTED"
    print(f"seed {options.seed}: {verdict}; {time.monotonic() - started:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
