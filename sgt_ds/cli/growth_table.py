"""Decisions and loops as lines for a person. Knows no run and no journal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgt_ds.growth import Decision

HEADER = f"{'step':>8}  {'event':<9} {'layer':>5} {'depth':>5}  {'heads':<12} {'margin':<15} why"


def print_loops(loops: dict[str, Any]) -> None:
    """Print the loops that are there, one layer a line."""
    for layer, loop in loops.items():
        print(f"  layer {layer}  depth {loop['depth']}  heads {_heads(loop['heads'])}")


def row_of(decision: Decision) -> str:
    """One decision as a row of the table, under `HEADER`."""
    changed = [
        layer
        for layer, loop in decision.after.loops.items()
        if decision.before.loops.get(layer) != loop
    ]
    layer = ",".join(str(number) for number in changed) or "-"
    depth = heads = "-"
    if changed:
        loop = decision.after.loops[changed[-1]]
        depth = str(loop.depth)
        heads = "; ".join(_heads(decision.after.loops[number].heads) for number in changed)
    margin = "-"
    if decision.margin is not None:
        parts = (("layer", decision.margin.layer), ("head", decision.margin.head))
        margin = " ".join(f"{name[0]} {value:.1f}" for name, value in parts if value is not None)
    return (
        f"{decision.step:>8}  {decision.rule:<9} {layer:>5} {depth:>5}  {heads:<12} "
        f"{margin or '-':<15} {decision.reason}"
    )


def _heads(heads: list[int] | tuple[int, ...] | None) -> str:
    return "block" if heads is None else ",".join(str(head) for head in heads)
