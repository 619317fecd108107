"""Time and memory of one training step of some methods, relative to vanilla and to their FLOPs.

One process, plain torch: forward and backward of some micro-batches, AdamW, on random tokens. Knows
no launcher, no data and no run. Every round times every case once, so that a machine that slows
down slows them all.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sgt_ds.config import Entry, ModelConfig, OptimizerConfig, parse_variant
from sgt_ds.flops import loop_flops_per_token, parameter_count, vanilla_flops_per_token
from sgt_ds.growth import Loop, Passes, Scope, State, passes_at
from sgt_ds.memory import peak_resident_bytes, reset_peak_resident
from sgt_ds.model import LoopInputs, Transformer, loop_inputs
from sgt_ds.progress import Progress
from sgt_ds.training.optimizer import build_optimizer
from sgt_ds.training.step_profile import (
    StepProfile,
    check_profiler,
    profile_steps,
    profiles_as_json,
)
from sgt_ds.training.timing import synchronize

WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Setting:
    """What is measured, and how."""

    model: ModelConfig
    variants: tuple[str, ...]
    """METHOD:K with K passes after the main one; `vanilla`, to which all are compared, always runs."""
    layers: int
    """Looping layers: the deepest."""
    heads: int
    """Heads that loop, of sgt."""
    entering: tuple[Entry, ...]
    """Entry windows to time too: the deepest layer's first, alone."""
    micro_batch_size: int
    micro_batches: int
    """Added up before each optimizer step; the device is waited for once they are all queued."""
    sequence_length: int
    dtype: torch.dtype
    device: torch.device
    rounds: int
    modes: Sequence[str]
    """`eager`, `compiled`, or both."""
    fp8: bool = False
    """The blocks' products in float8."""
    profiled_steps: int = 0
    """Of each case, after the rounds, under the profiler."""


@dataclass(frozen=True)
class Row:
    """One case of one mode. Ratios are to vanilla of the same mode, with entropies, by round."""

    mode: str
    case: str
    entropy: bool
    """Measured, as runs do in every update."""
    step_seconds: float
    """Median over the rounds."""
    step_seconds_quartiles: tuple[float, float]
    forward_backward_seconds: float
    """Median, without the optimizer."""
    tokens_per_second: float
    flops_per_second: float
    """By the accountant's convention."""
    peak_memory_bytes: int | None
    """CUDA: allocated at most; CPU: resident set of the process at most, where the kernel tells."""
    time_ratio: float
    """Median over the rounds of this case's step over vanilla's."""
    time_ratio_quartiles: tuple[float, float]
    forward_backward_ratio: float
    forward_backward_ratio_quartiles: tuple[float, float]
    flops_ratio: float

    @property
    def excess(self) -> float | None:
        """Added share of forward and backward time over added share of FLOPs; None for vanilla."""
        added = self.flops_ratio - 1
        return (self.forward_backward_ratio - 1) / added if added else None


@dataclass(frozen=True)
class _Case:
    name: str
    entropy: bool
    passes: Mapping[int, Passes]


@dataclass
class _Stepper:
    """A model, its optimizer and one micro-batch."""

    model: Transformer
    optimizer: torch.optim.AdamW
    inputs: Tensor
    targets: Tensor
    micro_batches: int

    def step(
        self, mode: str, loops: Mapping[int, LoopInputs], measure: bool
    ) -> tuple[float, float]:
        """One step. Returns seconds of forward and backward, and of all of it."""
        device = self.inputs.device
        self.model.compile_blocks = mode == "compiled"
        self.optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        started = time.perf_counter()
        for _ in range(self.micro_batches):
            loss = self.model(self.inputs, self.targets, loops=loops, measure=measure).loss
            loss.backward()
        synchronize(device)
        middle = time.perf_counter()
        self.optimizer.step()
        synchronize(device)
        return middle - started, time.perf_counter() - started

    def step_seconds(self, mode: str, loops: Mapping[int, LoopInputs]) -> float:
        """One step with entropies measured. Returns seconds of all of it."""
        return self.step(mode, loops, True)[1]


def bench_step(setting: Setting) -> tuple[list[Row], list[StepProfile]]:
    """Measure vanilla, with and without entropies, and the variants, in each mode.

    Profiles, where they are asked for, are of the cases with entropies, as runs measure them.

    Raises: UserError where a variant is unknown, or the profiler sees nothing of the device.
    """
    cases = _cases(setting)
    stepper = _stepper(setting)
    plan = [(mode, case) for mode in setting.modes for case in cases]
    loops = {id(case): loop_inputs(case.passes, setting.device) for case in cases}
    peaks: dict[tuple[str, int], int | None] = {}
    times: dict[tuple[str, int], list[tuple[float, float]]] = {}
    total = len(plan) * (WARM_UP_STEPS + 1 + setting.rounds)
    with Progress("bench step", total, "steps") as progress:
        for mode, case in plan:
            inputs = loops[id(case)]
            for _ in range(WARM_UP_STEPS):
                stepper.step(mode, inputs, case.entropy)
                progress.advance(1, f"warming up {mode} {case.name}")
            if setting.profiled_steps and (mode, case) == plan[0]:
                # Before anything is measured, all of which its fault would discard.
                check_profiler(setting.device, partial(stepper.step_seconds, mode, inputs))
            _reset_peak(setting.device)
            stepper.step(mode, inputs, case.entropy)
            peaks[mode, id(case)] = _peak(setting.device)
            progress.advance()
        for _ in range(setting.rounds):
            for mode, case in plan:
                timed = stepper.step(mode, loops[id(case)], case.entropy)
                times.setdefault((mode, id(case)), []).append(timed)
                progress.advance(1, f"{mode} {case.name}")
    rows = [
        _row(
            setting,
            mode,
            case,
            times[mode, id(case)],
            times[mode, id(cases[0])],
            peaks[mode, id(case)],
        )
        for mode, case in plan
    ]
    if not setting.profiled_steps:
        return rows, []
    profiled = {
        (mode, case.name): partial(stepper.step_seconds, mode, loops[id(case)])
        for mode, case in plan
        if case.entropy
    }
    return rows, profile_steps(setting.device, profiled, setting.profiled_steps)


def bench_as_json(
    setting: Setting, rows: Sequence[Row], profiles: Sequence[StepProfile]
) -> dict[str, Any]:
    """The measurement as one document: what was measured, on what, each row and each profile."""
    cuda = setting.device.type == "cuda"
    return {
        "variants": setting.variants,
        "layers": setting.layers,
        "heads": setting.heads,
        "entering": setting.entering,
        "model": setting.model.model_dump(),
        "parameters": parameter_count(setting.model),
        "micro_batch_size": setting.micro_batch_size,
        "micro_batches": setting.micro_batches,
        "sequence_length": setting.sequence_length,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "fp8": setting.fp8,
        "device": torch.cuda.get_device_name(setting.device) if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rounds": setting.rounds,
        "warm_up_steps": WARM_UP_STEPS,
        "rows": [{**asdict(row), "excess": row.excess} for row in rows],
        "profile": profiles_as_json(setting.profiled_steps, profiles) if profiles else None,
    }


def _cases(setting: Setting) -> list[_Case]:
    """Vanilla as a run computes it comes first: all are compared with it."""
    model = setting.model
    looping = range(model.num_layers - setting.layers, model.num_layers)
    heads = tuple(range(setting.heads))
    cases = [_Case("vanilla", True, {}), _Case("vanilla", False, {})]

    def add(name: str, entry: Entry, loops: Mapping[int, Loop]) -> None:
        # The second of a window's two updates.
        passes = passes_at(State(loops), 1, entry=entry, interval=2, num_heads=model.num_heads)
        cases.append(_Case(name, True, passes))

    for variant in dict.fromkeys(setting.variants):
        method, depth = parse_variant(variant)
        scope: Scope = "block" if method == "block_loop" else "attention"
        loop = Loop(depth, heads if method == "sgt" else None, scope, step=0, entered=0)
        if depth:
            add(variant, "none", dict.fromkeys(looping, loop))
    for entry in dict.fromkeys(setting.entering):
        # By ramp no other head has looped before.
        leaving = tuple(range(setting.heads, model.num_heads)) if entry == "decay" else ()
        newest = Loop(1, heads, "attention", step=0, entered=0, leaving=leaving)
        add(f"entering by {entry}", entry, {looping[-1]: newest})
    return cases


def _stepper(setting: Setting) -> _Stepper:
    model = Transformer(setting.model, fp8=setting.fp8).to(
        device=setting.device, dtype=setting.dtype
    )
    optimizer = build_optimizer(
        model, OptimizerConfig(lr=1e-5), fused=setting.device.type == "cuda"
    )
    shape = (setting.micro_batch_size, setting.sequence_length + 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(setting.model.vocab_size, shape, generator=generator)
    tokens = tokens.to(setting.device)
    return _Stepper(model, optimizer, tokens[:, :-1], tokens[:, 1:], setting.micro_batches)


def _row(
    setting: Setting,
    mode: str,
    case: _Case,
    times: Sequence[tuple[float, float]],
    vanilla: Sequence[tuple[float, float]],
    peak: int | None,
) -> Row:
    steps = [step for _, step in times]
    step_ratios = [own[1] / base[1] for own, base in zip(times, vanilla, strict=True)]
    pass_ratios = [own[0] / base[0] for own, base in zip(times, vanilla, strict=True)]
    model, length = setting.model, setting.sequence_length
    base_flops = vanilla_flops_per_token(model, length)
    flops = base_flops + loop_flops_per_token(model, length, case.passes)
    seconds = statistics.median(steps)
    tokens_per_second = setting.micro_batches * setting.micro_batch_size * length / seconds
    return Row(
        mode=mode,
        case=case.name,
        entropy=case.entropy,
        step_seconds=seconds,
        step_seconds_quartiles=_quartiles(steps),
        forward_backward_seconds=statistics.median(own for own, _ in times),
        tokens_per_second=tokens_per_second,
        flops_per_second=tokens_per_second * flops,
        peak_memory_bytes=peak,
        time_ratio=statistics.median(step_ratios),
        time_ratio_quartiles=_quartiles(step_ratios),
        forward_backward_ratio=statistics.median(pass_ratios),
        forward_backward_ratio_quartiles=_quartiles(pass_ratios),
        flops_ratio=flops / base_flops,
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _reset_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        reset_peak_resident()


def _peak(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()
