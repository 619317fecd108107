"""The FLOPs that the paper prints, and the table of docs/flops.md that sets ours beside them.

`python tests/paper_flops.py` prints that table.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any

from sgt_ds.cli import main

# "Sparse Growing Transformer", main results table, column FLOPs: total in 10^18, and the overhead
# in percent that is printed beside it. `block`: three layers once more from the first update on;
# 1, 2, 3: SGT with that K_max, L = 3, h = 2, t_start = Δt = 250.
MAIN_TABLE: dict[str, dict[str | int, tuple[float, float]]] = {
    "275m": {
        "vanilla": (42.83, 0.0),
        "block": (51.50, 20.24),
        1: (43.46, 1.47),
        2: (43.88, 2.45),
        3: (44.21, 3.22),
    },
    "573m": {
        "vanilla": (87.41, 0.0),
        "block": (101.76, 16.42),
        1: (88.15, 0.85),
        2: (88.60, 1.36),
        3: (88.96, 1.77),
    },
    "1.2b": {
        "vanilla": (175.76, 0.0),
        "block": (205.65, 17.01),
        1: (177.06, 0.74),
        2: (177.85, 1.19),
        3: (178.48, 1.55),
    },
}
CELLS = [(preset, kind) for preset, row in MAIN_TABLE.items() for kind in row]

# Its ablation table, one layer of the 573M model: total in 10^18 and overhead in percent.
ABLATION = {
    "block_loop": (92.20, 5.48),
    "attention_loop": (89.01, 1.83),
    "high_entropy_loop": (87.74, 0.38),
    "low_entropy_loop": (87.74, 0.38),
}

# Its table of growth schedules (275M, K_max = 1) gives no FLOPs: t_start = Δt of its rows.
SCHEDULES = (100, 250, 500)


def flags_of(preset: str, kind: str | int) -> list[str]:
    """Flags of `sgt-ds plan` for a row of the main table."""
    method = {"vanilla": "vanilla", "block": "block_loop"}.get(str(kind), "sgt")
    flags = ["--preset", preset, "--method", method]
    return [*flags, "--k-max", str(kind)] if method == "sgt" else flags


def planned(*arguments: str) -> dict[str, Any]:
    """The document of `sgt-ds plan … --json`, without a process of its own."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["plan", *arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(output.getvalue())
    return document


def rows() -> Iterator[tuple[str, list[str], str]]:
    """Name, flags of `sgt-ds plan`, and what the paper prints."""
    names = {"vanilla": "vanilla", "block": "block loop"}
    for preset, kind in CELLS:
        total, percent = MAIN_TABLE[preset][kind]
        printed = f"{total:.2f}" if kind == "vanilla" else f"{total:.2f} (+{percent:.2f}%)"
        yield (
            f"{preset}, {names.get(str(kind), f'SGT K = {kind}')}",
            flags_of(preset, kind),
            printed,
        )
    for method, (total, percent) in ABLATION.items():
        flags = ["--preset", "573m", "--method", method, "--layers", "7,"]
        yield f"573m, {method}, one layer", flags, f"{total:.2f} (+{percent:.2f}%)"
    for window in SCHEDULES:
        flags = [*flags_of("275m", 1), "--t-start", str(window), "--interval", str(window)]
        yield f"275m, SGT K = 1, t_start = Δt = {window}", flags, "–"


def table() -> str:
    """The table, in Markdown."""
    lines = ["| run | `sgt-ds plan` | ours, 10^18 | paper, 10^18 |", "|---|---|---|---|"]
    for name, flags, printed in rows():
        document = planned(*flags)
        ours = f"{document['total_flops'] / 1e18:.3f}"
        if document["overhead_ratio"]:
            ours += f" (+{document['overhead_ratio']:.2%})"
        lines.append(f"| {name} | `{' '.join(flags)}` | {ours} | {printed} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
