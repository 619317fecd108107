"""One run at several numbers of ranks of this host, through the launcher: is it the same run?

    python tests/many_ranks.py --ranks 1 2 4 8
    python tests/many_ranks.py --ranks 1 2 4 8 --deepspeed ds_configs/zero2_bf16.json   # GPUs

In fp32 Θ must be the same at every number of ranks, hash by hash, and losses within 1e-6 over 20
updates; in bf16 every journal must lead to its own decisions, and the first that differs is told
with its margin. A run saved at the most ranks goes on at half as many, and back. At last one of the
most ranks is killed while layers grow: the run must stop, resume, and have the same journal. Prints
a line for each; exit status 1 where one does not hold.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import runs
import torch

from sgt_ds.growth import Decision, DecisionLine, read_journal
from sgt_ds.telemetry import heartbeats
from sgt_ds.training import roll_back

STEPS, COMPARED = 40, 20
GROWTH = {"t_start": 4, "interval": 4}
LOSS_TOLERANCE = 1e-6


class Bench:
    """The runs, all of the same configuration but for what a name changes."""

    def __init__(self, folder: Path, deepspeed: Path, most: int) -> None:
        self.folder, self.deepspeed, self.most = folder, deepspeed, most
        self.fp32 = "fp32" in deepspeed.name
        self.data = runs.write_data(folder / "data")
        self.faults: list[str] = []

    def write(self, name: str, **training: Any) -> Path:
        return runs.write_run(
            self.folder / f"{name}.yaml",
            self.data,
            growth=GROWTH,
            training={
                "steps": STEPS,
                "global_batch_size": 2 * self.most,
                "micro_batch_size": 1,
                **training,
            },
            checkpoint={"every": 2, "keep_last": STEPS},
            telemetry={"enabled": False},
            deepspeed=str(self.deepspeed),
        )

    def train(self, name: str, ranks: int) -> Path:
        began = time.monotonic()
        runs.run_to_end(runs.launcher(self.write(name), ranks), timeout=600)
        say(f"{name}: trained on {ranks} ranks in {time.monotonic() - began:.0f} s")
        runs.check_replay(self.folder / name)
        return self.folder / name

    def compare(self, run: Path, base: Path, what: str) -> None:
        """Hold `run` to `base`: Θ at every decision, losses over the first updates."""
        own, other = decisions(run), decisions(base)
        told = [(one.step, one.rule, one.after.digest) for one in own]
        parted = next(
            (one for one, pair in zip(own, other, strict=False) if not same(one, pair)), None
        )
        first, second = runs.losses(run), runs.losses(base)
        gap = max(abs(first[step] - second[step]) for step in range(1, COMPARED + 1))
        later = max(abs(first[step] - second[step]) for step in range(1, STEPS + 1))
        line = f"{what}: {len(told)} decisions, losses within {gap:.1e} ({later:.1e} over {STEPS})"
        if parted is not None:
            line += f"; Θ first differs at step {parted.step}, margin {parted.margin}"
        say(line)
        if self.fp32 and (parted is not None or len(own) != len(other) or gap > LOSS_TOLERANCE):
            self.faults.append(what)

    def move(self, base: Path) -> None:
        """Saved at the most ranks, on at half as many, and back."""
        before = base
        for name, ranks, step in (("half", self.most // 2, 10), ("back", self.most, 18)):
            shutil.copytree(before, self.folder / name)
            file = self.write(name)
            roll_back(self.folder / name, step)
            runs.run_to_end(runs.launcher(file, ranks), timeout=600)
            before = self.folder / name
        runs.check_replay(before)
        self.compare(before, base, f"{self.most} → {self.most // 2} → {self.most} ranks")

    def kill_one(self, base: Path) -> None:
        """SIGKILL of one rank while layers grow, under `sgt-ds train`."""
        file = self.write("killed")
        run = self.folder / "killed"
        command = [
            *(sys.executable, "-m", "sgt_ds", "train", str(file), "--num-gpus"),
            str(self.most),
        ]
        with subprocess.Popen(
            command,
            env=runs.environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as job:
            runs.wait_for_step(run, 9)
            (launch,) = (run / "control" / "ranks").iterdir()
            beats = heartbeats.read_beats(launch, self.most - 1)
            began = time.monotonic()
            os.kill(beats[0][0].pid, signal.SIGKILL)
            said = job.communicate(timeout=120)[1].strip().splitlines()[-1]
        say(
            f"killed rank {self.most - 1}: ended with {job.returncode} in {time.monotonic() - began:.1f} s: {said}"
        )
        if job.returncode != 1 or f"rank {self.most - 1}" not in said:
            self.faults.append("the killed rank is not named")
        runs.run_to_end([*command], timeout=600)
        runs.check_replay(run)
        exact = runs.losses(run) == runs.losses(base)
        exact = exact and runs.journal_lines(run) == runs.journal_lines(base)
        if exact:
            say("resumed: losses and journal are those of the run that was left alone, bit for bit")
        elif torch.cuda.is_available():  # its kernels need not add up in the same order
            self.compare(run, base, "resumed")
        else:
            self.faults.append("the killed run is not the one that was left alone")


def decisions(run: Path) -> list[Decision]:
    _, lines = read_journal(run / "growth.jsonl")
    return [line.decision for line in lines if isinstance(line, DecisionLine)]


def same(one: Decision, other: Decision) -> bool:
    return (one.step, one.rule, one.after) == (other.step, other.rule, other.after)


def say(text: str) -> None:
    print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--deepspeed", type=Path, default=runs.CPU_FP32)
    options = parser.parse_args(arguments)
    most = max(options.ranks)
    if most < 2:
        parser.error("--ranks: one of them must be 2 or more, to be moved and killed")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options.deepspeed.resolve(), most)
        trained = {ranks: bench.train(f"on-{ranks}", ranks) for ranks in sorted(options.ranks)}
        for ranks in sorted(options.ranks)[:-1]:
            bench.compare(trained[ranks], trained[most], f"{ranks} beside {most} ranks")
        bench.move(trained[most])
        bench.kill_one(trained[most])
        for fault in bench.faults:
            say(f"PARTED: {fault}")
        return 1 if bench.faults else 0


if __name__ == "__main__":
    sys.exit(main())
