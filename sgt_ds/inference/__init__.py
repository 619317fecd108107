"""From checkpoint to serving: conversion, the exported model's code, generation.

`hf/modeling_sgt.py` travels with every export that loops and knows nothing of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgt_ds.lazy import lazy_exports

if TYPE_CHECKING:
    from sgt_ds.inference.bench import InferenceRow, InferenceSetting, bench_inference
    from sgt_ds.inference.conversion import convert
    from sgt_ds.inference.device import usable_device
    from sgt_ds.inference.generation import Completion, Sampling, TextGenerator
    from sgt_ds.inference.importing import import_model
    from sgt_ds.inference.scored import ScoredModel, load_scored_model

__all__ = [
    "Completion",
    "InferenceRow",
    "InferenceSetting",
    "Sampling",
    "ScoredModel",
    "TextGenerator",
    "bench_inference",
    "convert",
    "import_model",
    "load_scored_model",
    "usable_device",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "bench": ("InferenceRow", "InferenceSetting", "bench_inference"),
        "conversion": ("convert",),
        "device": ("usable_device",),
        "generation": ("Completion", "Sampling", "TextGenerator"),
        "importing": ("import_model",),
        "scored": ("ScoredModel", "load_scored_model"),
    },
)
