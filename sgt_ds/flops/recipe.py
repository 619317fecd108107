"""The starting point of a plan: the paper's recipe, a run's configuration, or a journal header.

Knows no flags; of DeepSpeed only what memory depends on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sgt_ds.config import (
    PRESETS,
    GrowthConfig,
    ModelConfig,
    RunConfig,
    precision_of,
    resolve_deepspeed,
)
from sgt_ds.errors import UserError
from sgt_ds.flops.memory import DEEPSPEED_BUCKET, Layout
from sgt_ds.growth import check_method, read_journal

PAPER_PRESET = "573m"
"""The shape that is planned where none is named."""


@dataclass(frozen=True)
class Recipe:
    """All that FLOPs depend on; by default the paper's main experiment."""

    model: ModelConfig = PRESETS[PAPER_PRESET]
    method: str = "sgt"
    growth: GrowthConfig = field(default_factory=GrowthConfig)
    sequence_length: int = 4096
    global_batch_size: int = 1024
    steps: int = 5035
    warmup_steps: int = 0
    """Updates over which the learning rate rises; 0 where nothing says."""


def recipe_of_run(config: RunConfig) -> Recipe:
    """A run's configuration."""
    return Recipe(
        config.model,
        config.method,
        config.growth,
        config.data.sequence_length,
        config.training.global_batch_size,
        config.training.steps,
        config.optimizer.warmup_steps,
    )


def recipe_of_journal(path: Path) -> Recipe:
    """A journal's header; the paper's recipe for a journal without one.

    Raises: UserError where the header can't be used.
    """
    header, _ = read_journal(path, live=True)
    if header is None:
        return Recipe()
    counts = []
    for key in ("sequence_length", "global_batch_size", "steps"):
        value = header.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(
                path, "line 1", f"the header's {key} is {value!r}, not a count; correct it"
            )
        counts.append(value)
    check_method(header.method, f"{path}: line 1")
    return Recipe(header.model, header.method, header.growth, *counts)


def layout_of_run(config: RunConfig, world_size: int, config_file: str | Path) -> Layout:
    """What a run's configuration and its DeepSpeed file say about memory.

    Raises: UserError where they do not fit each other or the number of ranks.
    """
    deepspeed = resolve_deepspeed(config, world_size, config_file)
    zero = deepspeed.get("zero_optimization", {})
    bucket = zero.get("reduce_bucket_size")
    # "auto" and absence both leave DeepSpeed's own default.
    elements = int(bucket) if isinstance(bucket, int | float) else DEEPSPEED_BUCKET
    return Layout(
        world_size=world_size,
        micro_batch_size=config.training.micro_batch_size,
        zero_stage=zero.get("stage", 0),
        precision="fp32" if precision_of(deepspeed) == "fp32" else "bf16",
        compiled=config.training.compile,
        activation_checkpointing=config.training.activation_checkpointing,
        fp8=config.training.fp8,
        reduce_bucket_size=elements,
        overlap_comm=zero.get("overlap_comm") is True,
    )
