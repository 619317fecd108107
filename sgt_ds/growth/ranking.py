"""Order of layers and heads by entropy, with ties and margins handled in one place. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sgt_ds.growth.decision import Margin
from sgt_ds.growth.statistics import Entropy


def rank_layers(means: Sequence[float], excluded: Iterable[int] = ()) -> tuple[int, ...]:
    """Layers by mean entropy, highest first; of equal ones the deeper first. No NaN in `means`."""
    left_out = set(excluded)
    eligible = (layer for layer in range(len(means)) if layer not in left_out)
    return tuple(sorted(eligible, key=lambda layer: (-means[layer], -layer)))


def rank_heads(
    entropies: Sequence[float], heads: Iterable[int], *, lowest: bool = False
) -> tuple[int, ...]:
    """`heads` by entropy, highest (or lowest) first; of equal ones the lower head first."""
    sign = 1.0 if lowest else -1.0
    return tuple(sorted(heads, key=lambda head: (sign * entropies[head], head)))


def layer_margin(entropy: Entropy, ranking: Sequence[int], taken: int) -> float | None:
    """Standard errors between the last of `taken` layers of `ranking` and the first left out."""
    if not 0 < taken < len(ranking):
        return None
    last, left_out = ranking[taken - 1], ranking[taken]
    means, errors = entropy.layer_means(), entropy.layer_stderr()
    return _standard_errors(means[last], means[left_out], errors[last], errors[left_out])


def head_margin(entropy: Entropy, layer: int, ranking: Sequence[int], taken: int) -> float | None:
    """Standard errors between the last of `taken` heads of `ranking` and the next one."""
    if not 0 < taken < len(ranking):
        return None
    last, left_out = ranking[taken - 1], ranking[taken]
    means, errors = entropy.mean[layer], entropy.stderr[layer]
    return _standard_errors(means[last], means[left_out], errors[last], errors[left_out])


def noise_note(margin: Margin) -> str:
    """What a reason says about a choice that another batch could have turned."""
    return "; within noise" if margin.within_noise else ""


def _standard_errors(first: float, second: float, error: float, other: float) -> float | None:
    spread = math.hypot(error, other)
    if not math.isfinite(spread) or spread == 0:
        return None
    return float(f"{abs(first - second) / spread:.3e}")
