"""What a sum of many ranks' gradients loses in bf16: the table of docs/launching.md.

`python tests/rank_sums.py` prints that table.
"""

from __future__ import annotations

import torch
from torch import Tensor

RANKS = (8, 64, 256, 512, 1024)
ELEMENTS = 5000
CHAIN = 8
# What the ranks' gradients have in common, beside what differs between them, which is 1.
AGREE, DIFFER = 1.0, 0.1


def gradients(ranks: int, common: float = AGREE) -> Tensor:
    """Gradients of so many ranks in bf16, a row each."""
    generator = torch.Generator().manual_seed(0)
    shared = common * torch.randn(ELEMENTS, generator=generator)
    return (shared + torch.randn(ranks, ELEMENTS, generator=generator)).bfloat16()


def chain(shares: Tensor) -> Tensor:
    """Sum of the rows, one after another, in their dtype: what a ring does."""
    total = torch.zeros_like(shares[0])
    for share in shares:
        total += share
    return total


def tree(shares: Tensor) -> Tensor:
    """Sum of the rows in chains of eight, whose sums are added in pairs, in their dtype."""
    sums = [chain(some) for some in shares.reshape(-1, CHAIN, ELEMENTS)]
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def ring_error(ranks: int, common: float = AGREE) -> float:
    """Relative error of a mean of gradients that a ring adds up in bf16."""
    rows = gradients(ranks, common)
    return distance(chain(rows / ranks), rows.double().mean(0))


def tree_error(ranks: int, common: float) -> float:
    rows = gradients(ranks, common)
    return distance(tree(rows / ranks), rows.double().mean(0))


def fp32_error(ranks: int, common: float) -> float:
    """The same where they are added up in float32 and the sum is rounded to bf16."""
    rows = gradients(ranks, common)
    return distance(chain(rows.float() / ranks).bfloat16(), rows.double().mean(0))


def percent(*errors: float) -> str:
    """The errors with one decimal, whole from ten percent on; a range where they differ."""
    low, high = (
        f"{100 * error:.{0 if error >= 0.1 else 1}f}" for error in (min(errors), max(errors))
    )
    return f"{low}%" if low == high else f"{low} to {high}%"


def table() -> str:
    """The table, in Markdown."""
    lines = [
        f"| ranks | ring, agree | ring, differ | chains of {CHAIN} in a tree | fp32 |",
        "|---|---|---|---|---|",
    ]
    for ranks in RANKS:
        cells = [
            percent(ring_error(ranks, AGREE)),
            percent(ring_error(ranks, DIFFER)),
            percent(*(tree_error(ranks, common) for common in (AGREE, DIFFER))),
            percent(*(fp32_error(ranks, common) for common in (AGREE, DIFFER))),
        ]
        lines.append(f"| {ranks:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
