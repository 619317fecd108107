"""The learning rate as a pure function of the growth clock: nothing to save, nothing to resume."""

from __future__ import annotations

import math

from sgt_ds.config import OptimizerConfig


def learning_rate(step: int, steps: int, optimizer: OptimizerConfig) -> float:
    """Learning rate of the update that follows `step` applied updates, of `steps` in all.

    Rises linearly over `warmup_steps`, then falls as a cosine to `final_lr_ratio` of its peak.
    """
    warmup = min(optimizer.warmup_steps, steps)
    if step < warmup:
        return optimizer.lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    floor = optimizer.final_lr_ratio
    return optimizer.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
