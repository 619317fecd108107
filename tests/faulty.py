"""A rank of a real run in which something goes wrong: what tests start through `forked.Nursery`.

The first argument says what, as JSON; the others are those of `sgt_ds.train`:
{"inf": {"rank", "step", "times"}}: a gradient of that rank is inf from that step on, so many times;
{"flip": {"rank", "step", "parameter"}}: one bit of that rank's parameter turns after that step;
{"full_disk": {"rank", "steps": [first, last], "size"}}: files of that rank can't grow past `size`
bytes then (200 kB where it is left out);
{"no_memory": {"rank"}}: no page of that rank's copy of a checkpoint is to be had;
{"no_rotation": true}: what would remove old checkpoints fails;
{"slow_disk": seconds}: every file of a checkpoint is written that late;
{"slow_updates": {"seconds"}}: every update takes that much longer;
{"slow_journal": {"seconds"}}: the disk takes that long for the first decision;
{"slow_compilers": {"seconds", "step"}}: compilers beside the rank take that long to end after that step,
while a save is under way;
{"slow_validation": {"seconds"}}: every validation takes that much longer;
{"memory_limit": file}: what the host's memory is limited to stands in that file;
{"dies": {"rank", "step"}}: that rank is killed where it waits for a save after that step;
{"stop": {"rank", "place"}}: that rank is stopped (SIGSTOP) in the first "save", "data" or "end";
{"lingers": rank}: that rank never joins.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sgt_ds import train, training
from sgt_ds.checkpoints import retention, saving
from sgt_ds.checkpoints.snapshot import Snapshots
from sgt_ds.errors import UserError
from sgt_ds.training import build, capacity


def main(arguments: list[str]) -> int:
    """Train with a fault. Returns the exit status."""
    faults = json.loads(arguments[0])
    if "slow_disk" in faults:
        write = saving.write_hashed

        def slowly(*given: Any) -> Any:
            time.sleep(faults["slow_disk"])
            return write(*given)

        saving.write_hashed = slowly
    if "no_rotation" in faults:

        def refuse(directory: Path, *given: Any) -> None:
            raise UserError(directory, None, "no such folder of checkpoints")

        retention.rotate = refuse  # type: ignore[assignment]
    if "memory_limit" in faults:
        capacity._LIMIT = Path(faults["memory_limit"])
    if str(faults.get("lingers")) == os.environ.get("RANK", "0"):
        training.join_ranks = lambda timeout: signal.pause()  # type: ignore[attr-defined]
    restore = build.restore

    def restore_and_break(trainer: Any, *given: Any, **named: Any) -> None:
        restore(trainer, *given, **named)
        for name, install in FAULTS.items():
            if name in faults:
                install(trainer, **faults[name])

    build.restore = restore_and_break
    return train.main(arguments[1:])


def digest(trainer: Any) -> str:
    """Of this rank's weights, master weights and moments; "not finite" where one is not."""
    zero, content = trainer.engine.optimizer, hashlib.sha256()
    own = getattr(zero, "single_partition_of_fp32_groups", [])  # without ZeRO: the model's
    tensors = [*trainer.engine.module.parameters(), *own]
    for state in getattr(zero, "optimizer", zero).state.values():
        tensors += [value for value in state.values() if torch.is_tensor(value)]
    for tensor in tensors:
        if not torch.isfinite(tensor).all():
            return "not finite"
        content.update(tensor.detach().float().numpy().tobytes())
    return content.hexdigest()


def inf(trainer: Any, rank: int, step: int, times: int) -> None:
    """Says of each skipped update whether it changed anything."""

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        here = trainer.ranks.rank == rank and trainer.clock.step == step
        if here and trainer.skips.total < times:
            gradient = gradient.clone()
            gradient.view(-1)[0] = float("inf")
        return gradient

    trainer.engine.module.norm.weight.register_hook(poison)
    train_step = trainer.train_step

    def watched() -> bool:
        before = digest(trainer)
        at, due = trainer.clock.step, trainer.growth.passes(trainer.clock.step)
        applied: bool = train_step()
        if not applied:
            facts = {
                "rank": trainer.ranks.rank,
                "state": digest(trainer) == before,
                "clock": trainer.clock.step == at and trainer.growth.passes(at) == due,
                "rate": trainer.engine.optimizer.param_groups[0]["lr"],
            }
            # In one write: the other ranks write to the same file.
            print(f"skip {json.dumps(facts)}\n", end="", flush=True)
        return applied

    trainer.train_step = watched


def flip(trainer: Any, rank: int, step: int, parameter: str) -> None:
    """One bit of one rank's weights."""

    def act() -> None:
        if trainer.ranks.rank == rank:
            weights = trainer.engine.module.get_parameter(parameter).data.view(-1)
            weights.view(torch.int32)[3] ^= 1

    _after(trainer, step, act)


def full_disk(trainer: Any, rank: int, steps: list[int], size: int = 200_000) -> None:
    """A real limit of the system on the size of the files that this process writes."""

    def limit(most: int) -> Callable[[], None]:
        def act() -> None:
            if trainer.ranks.rank == rank:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

        return act

    _after(trainer, steps[0], limit(size))
    _after(trainer, steps[1], limit(resource.RLIM_INFINITY))


def no_memory(trainer: Any, rank: int) -> None:
    """The allocation of a checkpoint's copy fails."""

    def refuse(self: Snapshots, source: torch.Tensor) -> torch.Tensor:
        raise MemoryError(f"{source.numel()} bytes are not to be had")

    if trainer.ranks.rank == rank:
        Snapshots._bytes = refuse  # type: ignore[method-assign]


def slow_updates(trainer: Any, seconds: float) -> None:
    """Long enough for a test to look in between."""
    train_step = trainer.train_step

    def slowly() -> bool:
        time.sleep(seconds)
        applied: bool = train_step()
        return applied

    trainer.train_step = slowly


def slow_journal(trainer: Any, seconds: float) -> None:
    """Rank 0 waits for its disk, once."""
    journal = trainer.growth.journal
    if journal is None:
        return
    decision = journal.decision

    def slowly(*given: Any) -> None:
        decision(*given)
        journal.decision = decision
        time.sleep(seconds)

    journal.decision = slowly


def slow_compilers(trainer: Any, seconds: float, step: int) -> None:
    """Stands for a rank that needs a kind which is not compiled ahead."""
    is_busy = trainer.checkpoints.is_busy

    def proceed(*_: object, **__: object) -> None:
        if trainer.clock.step == step:
            time.sleep(seconds)

    trainer.ahead = SimpleNamespace(proceed=proceed, close=lambda **_: None, compiled=0)
    trainer.checkpoints.is_busy = lambda: trainer.clock.step == step or is_busy()


def slow_validation(trainer: Any, seconds: float) -> None:
    validation = trainer.validation

    def slowly(*given: Any) -> float:
        time.sleep(seconds)
        loss: float = validation(*given)
        return loss

    trainer.validation = slowly


def dies(trainer: Any, rank: int, step: int) -> None:
    """One rank goes while the others wait with it."""
    finish = trainer.checkpoints.finish

    def finish_or_die(**given: Any) -> None:
        if trainer.ranks.rank == rank and trainer.clock.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        finish(**given)

    trainer.checkpoints.finish = finish_or_die


def stop(trainer: Any, rank: int, place: str) -> None:
    """As where a process is suspended, or its host freezes."""
    if trainer.ranks.rank != rank:
        return
    holder, name = {
        "save": (trainer.engine, "save_checkpoint"),
        "data": (trainer.loader, "read"),
        "end": (trainer, "close"),
    }[place]
    usual = getattr(holder, name)

    def stopped(*given: Any, **named: Any) -> Any:
        time.sleep(1.5)  # so that its last sign of life tells where it is
        os.kill(os.getpid(), signal.SIGSTOP)
        return usual(*given, **named)

    setattr(holder, name, stopped)


def _after(trainer: Any, step: int, act: Callable[[], None]) -> None:
    """Act when the update that makes the count `step` has been applied, before it is saved."""
    train_step = trainer.train_step

    def watched() -> bool:
        applied: bool = train_step()
        if applied and trainer.clock.step == step:
            act()
        return applied

    trainer.train_step = watched


FAULTS: dict[str, Callable[..., None]] = {
    "inf": inf,
    "flip": flip,
    "dies": dies,
    "full_disk": full_disk,
    "no_memory": no_memory,
    "slow_compilers": slow_compilers,
    "slow_journal": slow_journal,
    "slow_updates": slow_updates,
    "slow_validation": slow_validation,
    "stop": stop,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
