"""One of two ranks that train several runs one after another, to save each one a start.

Argument: a JSON file with a list of `{"run", "stops", "skip", "lose"}`. A run is stopped by a
request that appears during the updates which make the counts `stops`, closed, built anew and resumed.
`skip`: the update that would make this count has an inf gradient, once. `lose`: a file that is
gone before the run is resumed. Beside each run its trained model's logits of `probe`, and what
growth decisions did to anything of DeepSpeed's.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from sgt_ds.config import RunLayout, check_run_directory, load_run_config
from sgt_ds.growth import Decision
from sgt_ds.model import loop_inputs
from sgt_ds.training import Heartbeat, Ranks, Trainer, build_trainer, join_ranks, leave_ranks
from sgt_ds.training.build import prepare
from sgt_ds.training.resume import restore
from sgt_ds.training.run_directory import set_up_logging


def probe() -> torch.Tensor:
    """Token ids, int64 (3, 16)."""
    return torch.randint(0, 300, (3, 16), generator=torch.Generator().manual_seed(5))


def print_of(tensor: torch.Tensor) -> tuple[int, list[int], str]:
    """Where a tensor lies, its shape and its bytes."""
    content = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.data_ptr(), list(tensor.shape), hashlib.sha256(content).hexdigest()


def what_growth_must_not_touch(engine: Any) -> dict[str, Any]:
    """Parameters by name, ZeRO's flat buffers, and the state of the optimizer inside."""
    zero = engine.optimizer
    found: dict[str, Any] = {
        f"parameter {name}": (id(parameter), print_of(parameter))
        for name, parameter in engine.module.named_parameters()
    }
    for kind in ("bit16_groups_flat", "single_partition_of_fp32_groups"):
        for group, tensor in enumerate(getattr(zero, kind)):
            found[f"{kind} {group}"] = (id(tensor), print_of(tensor))
    for group, parameters in enumerate(zero.optimizer.param_groups):
        found[f"group {group}"] = [id(parameter) for parameter in parameters["params"]]
        for parameter in parameters["params"]:
            for name, value in zero.optimizer.state[parameter].items():
                found[f"{name} {group}"] = (id(value), print_of(value))
    return found


def watch_growth(trainer: Trainer, seen: dict[str, Any]) -> None:
    """Compare what growth must not touch before and after each decision that changes loops."""
    decide = trainer.growth.decide

    def watched(step: int, flops: int) -> Decision | None:
        if not trainer.growth.policy.is_due(step, trainer.growth.state):
            return decide(step, flops)
        before = what_growth_must_not_touch(trainer.engine)
        decision = decide(step, flops)
        after = what_growth_must_not_touch(trainer.engine)
        seen["things"] = len(before)
        seen["growths"] += int(decision is not None and decision.changes_loops)
        seen["touched"] += [
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        ]
        return decision

    trainer.growth.decide = watched  # type: ignore[method-assign]


def train_until(case: dict[str, Any], stop: int | None, ranks: Ranks, seen: dict[str, Any]) -> None:
    config = load_run_config(Path(case["run"]))
    layout, resuming = RunLayout(config.run_dir), check_run_directory(config)
    ranks.any(False)  # a barrier
    config = prepare(config, ranks, resuming=resuming)
    set_up_logging(config.run_dir, ranks.rank)
    heartbeat = Heartbeat(config.run_dir, ranks.rank, hang_seconds=60, patient_seconds=60)
    trainer = build_trainer(config, ranks, case["run"], heartbeat)
    restore(trainer, config, ranks, resuming=resuming)
    watch_growth(trainer, seen)

    def ask_to_stop(*_: object) -> None:
        if stop is not None and trainer.clock.step == stop - 1:
            layout.stop_request.touch()

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        if trainer.clock.step + 1 == case.get("skip") and trainer.skips.total == 0:
            gradient = torch.full_like(gradient, float("inf"))
        return gradient

    trainer.engine.module.register_forward_pre_hook(ask_to_stop)
    trainer.engine.module.norm.weight.register_hook(poison)
    trainer.train()
    assert trainer.clock.step == (stop or config.training.steps)
    passes = trainer.growth.passes(trainer.clock.step)
    with torch.no_grad():
        loops = loop_inputs(passes, ranks.device)
        logits = trainer.engine.module(probe(), loops=loops).logits
    trainer.close()
    if ranks.is_main:
        torch.save(logits, Path(case["run"]).with_suffix(".logits"))
    ranks.any(False)  # a barrier


def main(cases: Path) -> None:
    torch.set_num_threads(1)
    ranks = join_ranks(60)
    for case in json.loads(cases.read_text()):
        seen: dict[str, Any] = {"growths": 0, "touched": [], "things": 0}
        for number, stop in enumerate([*case.get("stops", []), None]):
            if number == 1 and ranks.is_main and "lose" in case:
                Path(case["lose"]).unlink()
            train_until(case, stop, ranks, seen)
        Path(case["run"]).with_suffix(f".seen{ranks.rank}").write_text(json.dumps(seen))
    leave_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
