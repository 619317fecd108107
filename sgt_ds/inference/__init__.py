"""From checkpoint to serving: conversion, the exported model's code, generation.

`hf/modeling_sgt.py` travels with every export that loops and knows nothing of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

_ROOMS = {
    "Completion": "generation",
    "InferenceRow": "bench",
    "InferenceSetting": "bench",
    "bench_inference": "bench",
    "Sampling": "generation",
    "ScoredModel": "scored",
    "TextGenerator": "generation",
    "convert": "conversion",
    "import_model": "importing",
    "load_scored_model": "scored",
    "usable_device": "device",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch and transformers when it is first asked for."""
    import importlib

    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_ROOMS[name]}"), name)
