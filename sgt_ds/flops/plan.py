"""The plan of a run before it starts: FLOPs, overhead, memory, time and cost. Pure arithmetic.

Knows no model and no device. The FLOPs are the accountant's, exact for the schedule assumed;
memory and time are estimates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgt_ds.config import FromJournal, GrowthConfig, ModelConfig, RunConfig
from sgt_ds.flops.accountant import FlopsCounter, parameter_count, vanilla_flops_per_token
from sgt_ds.flops.memory import Layout, Memory, memory_per_rank
from sgt_ds.flops.schedule import (
    Assumption,
    Schedule,
    Segment,
    earliest,
    finish_step,
    from_journal,
    latest,
    lower,
)
from sgt_ds.growth import Passes, State, build_policy, passes_at


@dataclass(frozen=True)
class Speed:
    """What turns FLOPs into time and money; figures that the user knows or has measured."""

    mfu_ratio: float
    """Share of the peak that training reaches, by this accountant's FLOPs."""
    peak_tflops: float
    """Peak of one GPU in the precision of training, in 10^12 FLOP/s."""
    price_per_gpu_hour: float | None = None
    """In any currency."""

    def cost_of(self, flops: int, world_size: int) -> dict[str, float | None]:
        """`seconds` on so many GPUs, `gpu_hours`, and `cost` where a price is known."""
        gpu_hours = flops / (self.mfu_ratio * self.peak_tflops * 1e12) / 3600
        price = self.price_per_gpu_hour
        return {
            "seconds": gpu_hours * 3600 / world_size,
            "gpu_hours": gpu_hours,
            "cost": None if price is None else gpu_hours * price,
        }


@dataclass(frozen=True)
class Event:
    """One layer's loop as one decision leaves it."""

    step: int
    rule: str
    layer: int
    depth: int
    heads: tuple[int, ...] | None
    """Heads that stay; None for a whole block."""
    computed_heads: int
    """Heads that one pass computes from here on, leaving ones included."""
    flops_per_token: int
    """Of the whole model, from the next update on."""
    total_flops: int
    """Spent until here."""
    overhead_ratio: float
    """Cumulative until here."""

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        heads = None if self.heads is None else list(self.heads)
        return {**vars(self), "heads": heads}


@dataclass(frozen=True)
class Outcome:
    """What one schedule costs."""

    assumption: Assumption
    total_flops: int
    overhead_ratio: float
    events: tuple[Event, ...]
    segments: tuple[tuple[Segment, int], ...]
    """The run's parts, each with the model's FLOPs of one token."""
    vanilla_flops_per_token: int

    def overhead_at(self, step: int) -> float:
        """Cumulative overhead after `step` updates, a ratio; 0 at step 0."""
        spent = sum(
            max(0, min(segment.end, step) - segment.start) * flops
            for segment, flops in self.segments
        )
        vanilla = step * self.vanilla_flops_per_token
        return (spent - vanilla) / vanilla if step else 0.0

    def as_json(self) -> dict[str, Any]:
        """The short form: totals and where growth ended."""
        return {
            "total_flops": self.total_flops,
            "overhead_ratio": self.overhead_ratio,
            "last_change": self.events[-1].step if self.events else None,
        }


@dataclass(frozen=True)
class Plan:
    """Everything that can be said about a run before it starts."""

    method: str
    model: ModelConfig
    sequence_length: int
    global_batch_size: int
    steps: int
    layout: Layout
    outcome: Outcome
    cases: dict[str, Outcome]
    """The other schedules, for comparison."""
    memory: Memory
    speed: Speed | None = None
    warnings: tuple[str, ...] = field(default=())

    @property
    def tokens(self) -> int:
        """Tokens that the run trains on."""
        return self.steps * self.global_batch_size * self.sequence_length

    def as_json(self) -> dict[str, Any]:
        """One document; its names are fixed."""
        speed = self.speed
        return {
            "method": self.method,
            "parameters": parameter_count(self.model),
            "steps": self.steps,
            "tokens": self.tokens,
            "flops_per_token_vanilla": vanilla_flops_per_token(self.model, self.sequence_length),
            "vanilla_flops": self.tokens
            * vanilla_flops_per_token(self.model, self.sequence_length),
            "total_flops": self.outcome.total_flops,
            "overhead_ratio": self.outcome.overhead_ratio,
            "schedule": self.outcome.assumption,
            "events": [event.as_json() for event in self.outcome.events],
            "segments": [
                {"start": segment.start, "end": segment.end, "flops_per_token": flops}
                for segment, flops in self.outcome.segments
            ],
            "cases": {name: case.as_json() for name, case in self.cases.items()},
            "layout": vars(self.layout),
            "memory_bytes": self.memory.as_json(),
            "time": None
            if speed is None
            else {
                **vars(speed),
                **speed.cost_of(self.outcome.total_flops, self.layout.world_size),
            },
            "warnings": list(self.warnings),
        }


def earliest_outcome(
    model: ModelConfig,
    method: str,
    growth: GrowthConfig,
    *,
    sequence_length: int,
    global_batch_size: int,
    steps: int,
) -> Outcome:
    """What a run costs where growth comes at every window: what its overhead is held against."""
    schedule = earliest(method, growth, model, steps)
    tokens = global_batch_size * sequence_length
    return _price(schedule, model, method, growth, sequence_length, tokens)


def run_warnings(config: RunConfig, after_step: int = 0) -> list[str]:
    """What a run may do and hardly wants: growth, or a learning rate, that does not end in time.

    `after_step`: the update after which it begins; another than 0 for a fork.
    """
    growth, steps = config.growth, config.training.steps
    if after_step >= growth.t_start:  # windows that lie before it are none of this run's
        passed = (after_step - growth.t_start) // growth.interval + 1
        first = growth.t_start + passed * growth.interval
        growth = growth.model_copy(update={"t_start": first})
    if isinstance(growth.layers, FromJournal):
        # Which layers they are changes no time, and their journal may be gone.
        growth = growth.model_copy(update={"layers": list(range(growth.layers.top))})
    return [
        *_growth_warnings(config.method, growth, config.model, steps),
        *_rate_warnings(config.optimizer.warmup_steps, steps),
    ]


def plan(
    model: ModelConfig,
    method: str,
    growth: GrowthConfig,
    *,
    sequence_length: int,
    global_batch_size: int,
    steps: int,
    world_size: int = 8,
    layout: Layout | None = None,
    warmup_steps: int = 0,
    assumption: Assumption = "earliest",
    journal: Path | None = None,
    speed: Speed | None = None,
) -> Plan:
    """Plan a run.

    `layout`: how it is spread and executed; its ranks are counted instead of `world_size`.
    `warmup_steps`: of the learning rate, for a warning only.
    `assumption`: which schedule the plan stands on; with `journal` it is that run's own.
    Raises: UserError where a journal can't be used.
    """
    layout = layout or Layout(world_size=world_size)
    tokens = global_batch_size * sequence_length

    def priced(schedule: Schedule) -> Outcome:
        return _price(schedule, model, method, growth, sequence_length, tokens)

    cases = {
        "earliest": priced(earliest(method, growth, model, steps)),
        "latest": priced(latest(method, growth, model, steps)),
    }
    stalled = priced(lower(method, growth, model, steps))
    # A method that narrows its heads window by window costs more where it stalls, not less.
    cases["lower"] = min(cases["earliest"], stalled, key=lambda case: case.total_flops)
    warnings = _growth_warnings(method, growth, model, steps) + _rate_warnings(warmup_steps, steps)
    if journal is not None:
        schedule, reached = from_journal(journal, method, growth, model, steps)
        outcome = priced(schedule)
        if reached < steps:
            warnings.append(
                f"the journal ends at step {reached} of {steps}; no growth is assumed after it"
            )
    else:
        outcome = cases[assumption]
    return Plan(
        method=method,
        model=model,
        sequence_length=sequence_length,
        global_batch_size=global_batch_size,
        steps=steps,
        layout=layout,
        outcome=outcome,
        cases=cases,
        memory=memory_per_rank(
            model,
            sequence_length,
            layout,
            [segment.passes for segment, _ in outcome.segments],
        ),
        speed=speed,
        warnings=tuple(warnings),
    )


def _price(
    schedule: Schedule,
    model: ModelConfig,
    method: str,
    growth: GrowthConfig,
    sequence_length: int,
    tokens: int,
) -> Outcome:
    """Count a schedule's FLOPs. `tokens`: of one update."""
    policy = build_policy(method, growth, model)
    counter = FlopsCounter(model, sequence_length)
    segments: list[tuple[Segment, int]] = []
    spent = {0: (0, 0.0)}
    for segment in schedule.segments(policy, growth.interval, model.num_heads):
        counter.add((segment.end - segment.start) * tokens, segment.passes)
        segments.append((segment, counter.per_token))
        spent[segment.end] = (counter.total, counter.overhead_ratio)

    def events_of(step: int, rule: str, before: State, after: State) -> list[Event]:
        passes = passes_at(
            after, step, entry=policy.entry, interval=growth.interval, num_heads=model.num_heads
        )
        total, overhead = spent[step]
        return [
            Event(
                step=step,
                rule=rule,
                layer=layer,
                depth=loop.depth,
                heads=loop.heads,
                computed_heads=passes[layer].head_count(model.num_heads),
                flops_per_token=_per_token(model, sequence_length, passes),
                total_flops=total,
                overhead_ratio=overhead,
            )
            for layer, loop in after.loops.items()
            if before.loops.get(layer) != loop
        ]

    events = events_of(0, "activate", State(), schedule.initial)
    for change in schedule.changes:
        events += events_of(change.step, change.rule, change.before, change.after)
    return Outcome(
        schedule.assumption,
        counter.total,
        counter.overhead_ratio,
        tuple(events),
        tuple(segments),
        vanilla_flops_per_token(model, sequence_length),
    )


def _per_token(model: ModelConfig, sequence_length: int, passes: dict[int, Passes]) -> int:
    counter = FlopsCounter(model, sequence_length)
    counter.add(0, passes)
    return counter.per_token


def _rate_warnings(warmup_steps: int, steps: int) -> list[str]:
    """What keeps the learning rate from falling."""
    if warmup_steps < steps:
        return []
    return [
        f"the learning rate never decays: its warm-up takes {warmup_steps} steps "
        f"(optimizer.warmup_steps) and the run has {steps}; shorten the warm-up, or train longer"
    ]


def _growth_warnings(
    method: str, growth: GrowthConfig, model: ModelConfig, steps: int
) -> list[str]:
    """What keeps the growth from ending in time, even where every window changes something."""
    finish = finish_step(method, growth, model)
    if finish is None:
        return [
            f"growth can't finish: no window is measured (t_start {growth.t_start}, interval "
            f"{growth.interval}, entropy_every {growth.entropy_every})"
        ]
    if finish >= steps:
        return [
            f"growth can't finish before training ends: it needs more than {finish} steps, the run "
            f"has {steps}; lower t_start, interval, layers or k_max, or train longer"
        ]
    if growth.freeze_at is not None and finish >= max(1, growth.freeze_at):
        return [
            f"growth can't finish before freeze_at {growth.freeze_at}: it needs {finish} steps; "
            f"freeze after step {finish}"
        ]
    return []
