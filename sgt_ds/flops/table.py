"""The plan as a table for people. Knows no arithmetic but units."""

from __future__ import annotations

from collections.abc import Iterator

from sgt_ds.flops.accountant import parameter_count, vanilla_flops_per_token
from sgt_ds.flops.memory import Memory
from sgt_ds.flops.plan import Outcome, Plan
from sgt_ds.progress import duration

_MEANING = {
    "earliest": "grows at every window",
    "latest": "grows as late as still fits",
    "lower": "stalls after its first layer",
    "journal": "as journalled",
}


def table(plan: Plan, preset: str | None = None, *, ranks_assumed: bool = False) -> str:
    """Totals, cases, events and memory, in lines of at most 100 columns.

    `ranks_assumed`: no one has said how many there are.
    """
    return "\n".join(_lines(plan, preset, ranks_assumed))


def flops(value: int) -> str:
    """A number of FLOPs for a person: `88.96e18`, `62.85e9`."""
    exponent = max(0, (len(str(value)) - 1) // 3 * 3)
    scaled = value / 10**exponent
    if exponent == 21:  # the paper's unit is 10^18
        exponent, scaled = 18, value / 1e18
    return f"{scaled:.2f}e{exponent}" if exponent else str(value)


def _lines(plan: Plan, preset: str | None, ranks_assumed: bool) -> Iterator[str]:
    shape = plan.model
    vanilla = vanilla_flops_per_token(shape, plan.sequence_length)
    yield (
        f"{preset or 'model'}: {parameter_count(shape):,} parameters, {shape.num_layers} layers × "
        f"{shape.num_heads} heads; method {plan.method}"
    )
    yield (
        f"{plan.steps:,} steps × {plan.global_batch_size:,} sequences × {plan.sequence_length:,} "
        f"positions = {plan.tokens:,} tokens"
    )
    yield f"without loops: {flops(vanilla)} FLOPs per token, {flops(vanilla * plan.tokens)} in all"
    yield ""
    yield f"{'schedule':<40} {'FLOPs':>12} {'overhead':>9}  last change"
    yield from _cases(plan)
    if plan.outcome.events:
        yield ""
        yield from _events(plan.outcome)
    yield ""
    yield from _memory(plan.memory, plan)
    if ranks_assumed:
        yield "  this number of ranks is assumed; set it with --world-size"
    if plan.speed is not None:
        cost = plan.speed.cost_of(plan.outcome.total_flops, plan.layout.world_size)
        seconds, gpu_hours = cost["seconds"] or 0.0, cost["gpu_hours"]
        price = "" if cost["cost"] is None else f", cost {cost['cost']:,.2f}"
        yield ""
        yield (
            f"time at {plan.speed.mfu_ratio:.0%} of {plan.speed.peak_tflops:g} TFLOP/s on "
            f"{plan.layout.world_size} GPUs: {duration(seconds)}, {gpu_hours:,.1f} GPU-hours{price}"
        )
    for warning in plan.warnings:
        yield ""
        yield f"warning: {warning}"


def _cases(plan: Plan) -> Iterator[str]:
    outcomes = {plan.outcome.assumption: plan.outcome}
    # A case that another stands for has its name: it would only stand twice.
    outcomes |= {name: case for name, case in plan.cases.items() if case.assumption == name}
    static = len({case.total_flops for case in outcomes.values()}) == 1
    for name, case in outcomes.items():
        chosen = "*" if name == plan.outcome.assumption else " "
        label = "* any" if static else f"{chosen} {name}: {_MEANING[name]}"
        last = f"step {case.events[-1].step}" if case.events else "never"
        yield f"{label:<40} {flops(case.total_flops):>12} {case.overhead_ratio:>9.2%}  {last}"
        if static:
            return


def _events(outcome: Outcome) -> Iterator[str]:
    yield (
        f"{'step':>7} {'event':<9} {'layer':>5} {'depth':>5} {'heads':>6} {'FLOPs/token':>12} "
        f"{'FLOPs so far':>13} {'overhead':>9}"
    )
    for event in outcome.events:
        # A list of heads is an example where the schedule is assumed: the number is what counts.
        heads = "block" if event.heads is None else str(len(event.heads))
        if event.heads is not None and event.computed_heads != len(event.heads):
            heads = f"{event.computed_heads}>{heads}"
        yield (
            f"{event.step:>7} {event.rule:<9} {event.layer:>5} {event.depth:>5} {heads:>6} "
            f"{flops(event.flops_per_token):>12} {flops(event.total_flops):>13} "
            f"{event.overhead_ratio:>9.2%}"
        )
    if any(event.heads and event.computed_heads != len(event.heads) for event in outcome.events):
        yield "heads a>b: all a are computed for one window, then the remaining b"


def _ranks(plan: Plan) -> str:
    count = plan.layout.world_size
    return "the one rank" if count == 1 else f"one of {count} ranks"


def _memory(memory: Memory, plan: Plan) -> Iterator[str]:
    layout = plan.layout
    kept = "recomputed" if layout.activation_checkpointing else "kept"
    yield (
        f"memory of {_ranks(plan)} at its peak (ZeRO-{layout.zero_stage}, "
        f"{layout.precision}, micro-batch {layout.micro_batch_size}, activations {kept})"
    )
    unit, bytes_of_unit = ("GiB", 2**30) if memory.total >= 2**30 else ("MiB", 2**20)
    for name, size in memory.as_json().items():
        yield f"  {name:<12} {size / bytes_of_unit:>9.2f} {unit}"
    if layout.fp8:
        yield "  counted as in bf16: from a few thousand tokens per micro-batch on, float8 needs less"
