"""FLOPs: the accountant's exact counts, and the plan of a run before it starts."""

from sgt_ds.flops.accountant import (
    FlopsCounter,
    loop_flops_per_token,
    parameter_count,
    vanilla_flops_per_token,
)

__all__ = [
    "FlopsCounter",
    "loop_flops_per_token",
    "parameter_count",
    "vanilla_flops_per_token",
]
