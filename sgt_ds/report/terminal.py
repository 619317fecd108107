"""A view of a run as plain text for a terminal, 80 columns wide. Pure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from sgt_ds.progress import duration
from sgt_ds.report.view import LayerView, RunView

SHADES = " ░▒▓█"
BARS = "▁▂▃▄▅▆▇█"
MISSING = "·"
# Longer than most updates take: worth a word.
QUIET_SECONDS = 60.0
# For terminals whose encoding lacks the above.
_PLAIN = str.maketrans(SHADES[1:] + BARS[:-1] + MISSING + "×–", ".:*#" + "_.-~=+*" + "?" + "x-")


def render(view: RunView, width: int = 80, *, plain: bool = False) -> str:
    """The view as lines of at most `width` columns. `plain`: ASCII alone."""
    lines = [*_head(view, width), *_ranks(view), "", *_figures(view)]
    lines += [*_losses(view, width), *_layers(view, width)]
    text = "\n".join(line[:width].rstrip() for line in lines) + "\n"
    return text.translate(_PLAIN) if plain else text


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as bars of eight heights, binned to `width` columns; the range fills the height."""
    bins = binned(values, width)
    finite = [value for value in bins if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_glyph(value, low, high, BARS) for value in bins)


def binned(values: Sequence[float], width: int) -> list[float]:
    """Means of at most `width` equal pieces; NaN where a piece has no finite value."""
    count = min(width, len(values))
    means = []
    for index in range(count):
        piece = values[index * len(values) // count : (index + 1) * len(values) // count]
        finite = [value for value in piece if math.isfinite(value)]
        means.append(math.fsum(finite) / len(finite) if finite else math.nan)
    return means


def _head(view: RunView, width: int) -> list[str]:
    title = "  ".join(part for part in (view.name, view.method, view.phase or "") if part)
    progress = f"step {view.step:,}"
    if view.steps:
        progress += f"/{view.steps:,}"
    left = view.seconds_left
    if left is not None:
        progress += f"  ETA {duration(left)}" if left > 0 else "  done"
    # How a run ended may be long.
    state = textwrap.wrap(view.state, width) if view.is_over else []
    lines = [title if view.is_over else f"{title}  ({view.state})", *state, progress]
    if view.steps:
        share = min(1.0, view.step / view.steps)
        room = width - 9
        filled = int(share * room)
        lines.append(f"[{'#' * filled}{'-' * (room - filled)}] {100 * share:5.1f}%")
    return lines


def _ranks(view: RunView) -> list[str]:
    """Who answers, between which steps they are, and the slowest of them."""
    if not view.known_ranks or view.is_over:
        return []
    answering = [(rank, rank.step) for rank in view.ranks if rank.step is not None]
    asked = "" if len(view.ranks) == view.known_ranks else f" of {len(view.ranks)} asked"
    line = f"ranks {view.known_ranks}  {len(answering)}{asked} answer"
    mute = [rank.rank for rank in view.ranks if rank.step is None]
    if mute and answering:
        line += f", not {_numbers(mute)}"
    if answering:
        low, high = min(step for _, step in answering), max(step for _, step in answering)
        line += f"  step {low:,}" + (f" to {high:,}" if high > low else "")
    timed = [
        (rank.work_seconds, rank.rank) for rank, _ in answering if rank.work_seconds is not None
    ]
    if len(timed) > 1:
        seconds, slowest = max(timed)
        mean = math.fsum(each for each, _ in timed) / len(timed)
        line += f"  slowest {slowest} ({seconds / mean - 1:+.1%})"
    quiet = max((rank.quiet_seconds or 0.0, rank.rank) for rank in view.ranks)
    if quiet[0] > QUIET_SECONDS:
        line += f"  rank {quiet[1]} quiet for {duration(quiet[0])}"
    return [line]


def _numbers(values: Sequence[int]) -> str:
    return ",".join(map(str, values[:6])) + (",…" if len(values) > 6 else "")


def _figures(view: RunView) -> list[str]:
    first = [
        _figure("validation loss", view.validation_loss, "{:.4f}"),
        _figure("learning rate", view.learning_rate, "{:.2e}"),
        _figure("gradient norm", view.grad_norm, "{:.3g}"),
    ]
    plan = _figure("plan", view.planned_overhead_ratio, "+{:.2%}")
    second = [
        _figure("tokens/s", view.tokens_per_second, "{:,.0f}"),
        _figure("tokens", view.tokens, "{:.3g}"),
        _figure("MFU", view.mfu_ratio, "{:.1%}"),
        _figure("FLOPs overhead", view.overhead_ratio, "+{:.2%}") + (f" ({plan})" if plan else ""),
    ]
    return [line for line in ("  ".join(filter(None, row)) for row in (first, second)) if line]


def _figure(label: str, value: float | None, form: str) -> str:
    return "" if value is None else f"{label} {form.format(value)}"


def _losses(view: RunView, width: int) -> list[str]:
    if not view.losses:
        return ["", "no loss logged yet"]
    finite = [value for value in view.losses if math.isfinite(value)]
    span = f"{max(finite):.3f} to {min(finite):.3f}" if finite else "never finite"
    return ["", f"loss {view.losses[-1]:.4f}  ({span})", sparkline(view.losses, width)]


def _layers(view: RunView, width: int) -> list[str]:
    if not view.layers:
        return ["", "no entropy measured yet"]
    labels = [f"{number:>3} " for number in range(len(view.layers))]
    tails = [_tail(layer) for layer in view.layers]
    room = max(8, width - 4 - max(len(tail) for tail in tails))
    rows = [binned(layer.cells, room) for layer in view.layers]
    finite = [cell for row in rows for cell in row if math.isfinite(cell)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    columns = max(len(row) for row in rows)
    lines = [
        "",
        f"entropy by layer × {view.cells_mean}   {low:.3f} '{SHADES}' {high:.3f}",
    ]
    # Deep layers on top: growth goes from deep to shallow.
    for label, row, tail in reversed(list(zip(labels, rows, tails, strict=True))):
        # A column is as wide as whole characters allow where there are few.
        repeat = max(1, min(4, room // max(columns, 1)))
        cells = "".join(_glyph(cell, low, high, SHADES) * repeat for cell in row)
        lines.append(f"{label}{cells.ljust(columns * repeat)}{tail}")
    return lines


def _tail(layer: LayerView) -> str:
    text = "  –    " if layer.entropy is None else f"  {layer.entropy:.3f}"
    if layer.depth:
        heads = "all heads" if layer.heads is None else _heads(layer.heads)
        text += f"  loops ×{layer.depth}: {heads}"
    return text


def _heads(heads: Sequence[int]) -> str:
    return f"head{'' if len(heads) == 1 else 's'} {_numbers(heads)}"


def _glyph(value: float, low: float, high: float, scale: str) -> str:
    if not math.isfinite(value):
        return MISSING
    if high <= low:
        return scale[len(scale) // 2]
    return scale[min(len(scale) - 1, int((value - low) / (high - low) * len(scale)))]
