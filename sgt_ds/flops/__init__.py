"""FLOPs: the accountant's exact counts, and the plan of a run before it starts."""

from sgt_ds.flops.accountant import (
    FlopsCounter,
    loop_flops_per_token,
    parameter_count,
    vanilla_flops_per_token,
)
from sgt_ds.flops.memory import Layout, Memory, memory_per_rank
from sgt_ds.flops.plan import Event, Outcome, Plan, Speed, earliest_outcome, plan, run_warnings
from sgt_ds.flops.recipe import (
    PAPER_PRESET,
    Recipe,
    layout_of_run,
    recipe_of_journal,
    recipe_of_run,
)
from sgt_ds.flops.schedule import Assumption, passes_to_come
from sgt_ds.flops.table import table

__all__ = [
    "PAPER_PRESET",
    "Assumption",
    "Event",
    "FlopsCounter",
    "Layout",
    "Memory",
    "Outcome",
    "Plan",
    "Recipe",
    "Speed",
    "earliest_outcome",
    "layout_of_run",
    "loop_flops_per_token",
    "memory_per_rank",
    "parameter_count",
    "passes_to_come",
    "plan",
    "recipe_of_journal",
    "recipe_of_run",
    "run_warnings",
    "table",
    "vanilla_flops_per_token",
]
