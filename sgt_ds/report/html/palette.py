"""Colour-blind-safe colours, on light and on dark backgrounds. Pure.

Lines: the palette of Okabe and Ito, in an order that suits the background. Heat maps: viridis,
whose lightness rises evenly, so that it also reads in grey.
"""

from __future__ import annotations

LIGHT = ("#0072b2", "#d55e00", "#009e73", "#a6478d", "#8a6d00", "#2f97cf", "#000000", "#6b6b6b")
DARK = ("#56b4e9", "#e69f00", "#2bc59b", "#e39ac4", "#f0e442", "#ff8a3d", "#ffffff", "#a0a0a0")
"""One colour a run; the same place in both is the same run."""

_VIRIDIS = (
    *("#440154", "#482878", "#3e4989", "#31688e", "#26828e"),
    *("#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"),
)
SHADES = 48


def shade(place: float) -> int:
    """The shade of a value that is at `place`, 0 to 1, in its range."""
    return min(SHADES - 1, max(0, int(place * SHADES)))


def shade_colour(index: int) -> str:
    """The colour of a shade: dark blue is low, yellow is high."""
    at = index / (SHADES - 1) * (len(_VIRIDIS) - 1)
    left = min(int(at), len(_VIRIDIS) - 2)
    share = at - left
    pairs = zip(_channels(_VIRIDIS[left]), _channels(_VIRIDIS[left + 1]), strict=True)
    return "#" + "".join(f"{round(low + (high - low) * share):02x}" for low, high in pairs)


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[start : start + 2], 16) for start in (1, 3, 5))
