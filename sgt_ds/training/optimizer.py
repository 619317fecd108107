"""AdamW as every run and bench builds it. Knows no engine and no process group."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sgt_ds.config import OptimizerConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups: matrices decay, norm weights do not."""

    def select(matrices: bool) -> list[nn.Parameter]:
        return [p for p in model.parameters() if (p.ndim > 1) == matrices]

    return [
        {"params": select(True), "weight_decay": weight_decay},
        {"params": select(False), "weight_decay": 0.0},
    ]


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, *, fused: bool = True
) -> torch.optim.AdamW:
    """AdamW from torch: DeepSpeed's own is compiled on first use."""
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=fused,
    )
