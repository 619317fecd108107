"""Tables of `sgt-ds bench step --profile`: each case's step by part, beside vanilla's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sgt_ds.training import Row, StepProfile

_NAME_WIDTH = 100


def print_profiles(rows: Sequence[Row], profiles: Sequence[StepProfile]) -> None:
    """Print a table for each case but vanilla, or vanilla's own where it is alone in its mode."""
    from sgt_ds.training import vanilla_of

    alone = len(profiles) == len({each.mode for each in profiles})
    for each in profiles:
        vanilla = vanilla_of(each, profiles)
        if each is not vanilla or alone:
            _print_parts(rows, vanilla, each)
    for each in profiles:
        _print_kernels(each)
    if profiles:
        if not alone:
            print(
                "added ms: over vanilla's step; points: the same in percentage points of vanilla's step."
            )
        print(
            "idle: nothing ran on the device. Where kernels ran beside each other, a moment counts "
            "for the one that began first, and for collectives only if nothing else ran."
        )


def _print_parts(rows: Sequence[Row], vanilla: StepProfile, own: StepProfile) -> None:
    from sgt_ds.training import PARTS, added

    compared = own is not vanilla
    cases = [vanilla, own] if compared else [vanilla]
    print(f"\n{own.mode}, one step under the profiler: {', '.join(_told(rows, c) for c in cases)}")
    columns = "".join(f"{case.case + ' ms':>22}{'share':>8}{'kernels':>9}" for case in cases)
    differences = f"{'added ms':>11}{'points':>8}{'ms, lowest to highest':>24}" if compared else ""
    print(f"{'part':34}{columns}{differences}")
    empty = []
    for index, difference in enumerate(added(own, vanilla)):
        parts = [case.parts[index] for case in cases]
        if not any(part.seconds for part in parts):
            empty.append(PARTS[parts[0].part])
            continue
        line = "".join(
            f"{1000 * part.seconds:22.3f}{100 * part.step_ratio:7.2f}%{part.kernels:9,.0f}"
            for part in parts
        )
        if compared:
            spread = f"{1000 * difference.lowest_seconds:+.3f} to {1000 * difference.highest_seconds:+.3f}"
            line += (
                f"{1000 * difference.seconds:+11.3f}{100 * difference.step_ratio:+8.2f}{spread:>24}"
            )
        print(f"{PARTS[parts[0].part]:34}{line}")
    _print_sum(cases)
    if empty:
        print(f"nothing in: {'; '.join(empty)}")


def _print_sum(cases: Sequence[StepProfile]) -> None:
    line = "".join(
        f"{1000 * case.step_seconds:22.3f}{100.0:7.2f}%{sum(p.kernels for p in case.parts):9,.0f}"
        for case in cases
    )
    if len(cases) == 2:
        base, more = cases[0].step_seconds, cases[1].step_seconds - cases[0].step_seconds
        line += f"{1000 * more:+11.3f}{100 * more / base:+8.2f}"
    print(f"{'step':34}{line}")


def _told(rows: Sequence[Row], own: StepProfile) -> str:
    timed = next(r for r in rows if r.entropy and (r.mode, r.case) == (own.mode, own.case))
    hidden = f", {1000 * own.hidden_seconds:.3f} ms hidden" if own.hidden_seconds > 1e-6 else ""
    return (
        f"{own.case} {1000 * own.step_seconds:.1f} ms "
        f"(without it {1000 * timed.step_seconds:.1f}{hidden})"
    )


def _print_kernels(own: StepProfile) -> None:
    print(f"\n{own.mode} {own.case}, largest kernels:")
    for title, kernels in (("", own.kernels), ("largest of other:", own.unmatched)):
        if title and kernels:
            print(title)
        for kernel in kernels:
            name = kernel.name
            name = name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 1]}…"
            print(f"{1000 * kernel.seconds:10.3f} ms{kernel.calls:8,.0f}  {kernel.part:12} {name}")
