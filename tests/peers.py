"""Other trainers, timed at the shape of a preset: what docs/performance.md compares sgt-ds with.

    python tests/peers.py transformers --preset 573m --gpus 2
    python tests/peers.py torchtitan --preset 573m --gpus 1

`transformers`: its LlamaForCausalLM, fp32 weights under bf16 autocast, sdpa, compiled, in a plain
loop of torch's DistributedDataParallel: gradients reduced in the last micro-batch and clipped at 1.0,
fused AdamW. `torchtitan`: the trainer of torchtitan 0.2.2 with its Llama 3 and its defaults, except:
no activation checkpointing, blocks and loss compiled, FSDP with bf16 parameters and fp32 masters on
one GPU too (it would use autocast there), nothing logged after the first update.

Both train on random tokens, with the vocabulary as sgt-ds pads it; a model whose parameters are not
the preset's is refused. The device is waited for at the ends of intervals only. Without a GPU both
run on CPU cores with gloo: that tests the script and compares nothing (torchtitan imports Triton,
which torch's CPU builds come without). Exit status 2 where the trainer cannot be imported.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from sgt_ds.cli.frame import whole_number
from sgt_ds.config import PRESETS, ModelConfig
from sgt_ds.flops import parameter_count

# The module of each trainer, and what to install beside torch and the project's own packages.
TRAINERS = {
    "transformers": ("peer_transformers", "'transformers>=5'"),
    "torchtitan": (
        "peer_titan",
        "--no-deps torchtitan==0.2.2 torchdata tyro docstring-parser datasets dill multiprocess",
    ),
}


class Refused(Exception):
    """What the user can mend; exit status 2."""


@dataclass(frozen=True)
class Setting:
    """One measurement. The numbers are options of the same names."""

    trainer: str
    preset: str
    micro_batch_size: int = 8
    micro_batches: int = 8
    seq_len: int = 4096
    gpus: int = 1
    updates: int = 2
    intervals: int = 3
    warmup: int = 2

    @property
    def model(self) -> ModelConfig:
        return PRESETS[self.preset]

    @property
    def steps(self) -> int:
        return self.warmup + self.updates * self.intervals


class Clock:
    """Seconds per update of each interval; waits for the device at an interval's ends only."""

    def __init__(self, setting: Setting) -> None:
        self.warmup, self.updates = setting.warmup, setting.updates
        self.seconds: list[float] = []
        self._done, self._began = 0, 0.0

    def update_done(self) -> None:
        self._done += 1
        timed = self._done - self.warmup
        if timed < 0 or timed % self.updates:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if timed:
            self.seconds.append((now - self._began) / self.updates)
        elif torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._began = now


def checked_parameters(module: torch.nn.Module, model: ModelConfig) -> int:
    """Parameters of a trainer's model, padding rows included. Raises: Refused if not the preset's."""
    shapes = [tuple(weight.shape) for weight in module.parameters()]
    count = sum(map(math.prod, shapes))
    own = parameter_count(model) + 2 * model.padding_rows * model.hidden_size
    if count != own:
        raise Refused(f"its model has {count:,} parameters, the preset {own:,}")
    if shapes.count((model.intermediate_size, model.hidden_size)) != 2 * model.num_layers:
        raise Refused(f"its feed-forward networks are not {model.intermediate_size} wide")
    return count


def imported(trainer: str) -> ModuleType:
    """The trainer's module. Raises: Refused, with what to install."""
    name, packages = TRAINERS[trainer]
    if trainer == "torchtitan" and not torch.cuda.is_available():
        let_torchtitan_use_a_cpu()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Refused(f"{error}; pip install {packages}") from None


def let_torchtitan_use_a_cpu() -> None:
    """Give torch.cpu what torchtitan asks of its device's module; it takes CUDA's where none is."""
    answers: dict[str, Any] = dict.fromkeys(("reset_peak_memory_stats", "empty_cache"))
    answers |= {"get_device_name": "cpu", "memory_stats": {}, "current_device": 0}
    answers |= {"get_device_properties": argparse.Namespace(total_memory=1)}
    for name, answer in answers.items():
        setattr(torch.cpu, name, lambda *_, answer=answer: answer)
    torch._utils._get_available_device_type = lambda: "cpu"


def measure(setting: Setting, as_json: bool) -> None:
    """What each of the launched processes does; the first one prints."""
    on_gpu, clock = torch.cuda.is_available(), Clock(setting)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    model = imported(setting.trainer).train(setting, device, clock.update_done)
    parameters = checked_parameters(model, setting.model)
    peak = torch.tensor(torch.cuda.max_memory_allocated() if on_gpu else 0, device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        found = figures(setting, clock.seconds) | {
            "parameters": parameters,
            "peak_memory_bytes": int(peak) or None,
            "device": torch.cuda.get_device_name() if on_gpu else "CPU",
            "versions": {name: version(name) for name in (setting.trainer, "torch")},
        }
        print(json.dumps(found, indent=2) if as_json else line(found), flush=True)
    dist.destroy_process_group()


def figures(setting: Setting, seconds: list[float]) -> dict[str, Any]:
    """The setting, with seconds per update and tokens/s per GPU: median, minimum, maximum."""
    tokens = setting.micro_batch_size * setting.seq_len * setting.micro_batches
    kinds: dict[str, Callable[[list[float]], float]]
    kinds = {"median": statistics.median, "min": min, "max": max}
    speeds = [tokens / taken for taken in seconds]
    return asdict(setting) | {
        "seconds_per_update": {kind: pick(seconds) for kind, pick in kinds.items()},
        "tokens_per_second_per_gpu": {kind: pick(speeds) for kind, pick in kinds.items()},
    }


def line(found: dict[str, Any]) -> str:
    """The same for a person."""
    speed, taken = found["tokens_per_second_per_gpu"], found["seconds_per_update"]
    versions, peak = found["versions"], found["peak_memory_bytes"]
    return (
        f"{found['trainer']} {versions[found['trainer']]} (torch {versions['torch']}), "
        f"{found['preset']} ({found['parameters']:,} parameters), {found['gpus']} × {found['device']}: "
        f"{speed['median']:,.0f} tokens/s per GPU ({speed['min']:,.0f}–{speed['max']:,.0f}), "
        f"{taken['median']:.3f} s per update ({taken['min']:.3f}–{taken['max']:.3f})"
        + (f", peak {peak / 1e9:.1f} GB" if peak else "")
    )


def launch(setting: Setting) -> int:
    """Check the model without memory for it, then start a process for each GPU with torch's launcher."""
    if torch.cuda.is_available() and setting.gpus > torch.cuda.device_count():
        raise Refused(f"--gpus {setting.gpus}: this host has {torch.cuda.device_count()}")
    with torch.device("meta"):
        checked_parameters(imported(setting.trainer).build(setting), setting.model)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(setting.gpus), __file__, *sys.argv[1:], "--launched"]
    return subprocess.run(command, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trainer", choices=list(TRAINERS))
    parser.add_argument("--preset", choices=list(PRESETS), default="573m")
    numbers = [field for field in fields(Setting) if field.name not in ("trainer", "preset")]
    for field in numbers:
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=whole_number(1), default=field.default, metavar="N")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--launched", action="store_true", help=argparse.SUPPRESS)
    values = vars(parser.parse_args())
    as_json, launched = values.pop("json"), values.pop("launched")
    setting = Setting(**values)
    try:
        if not launched:
            return launch(setting)
        measure(setting, as_json)
    except Refused as fault:
        print(f"{setting.trainer}, {setting.preset}: {fault}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
