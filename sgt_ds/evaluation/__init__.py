"""Evaluation of anything that gives logits: tasks, perplexity, comparisons.

Loaded part by part when first asked for: naming a task needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sgt_ds.evaluation.items import METRICS, RULES, Item, Metric, Rule
from sgt_ds.evaluation.tasks import TASKS, Task, find_tasks

if TYPE_CHECKING:
    from sgt_ds.evaluation.comparison import Comparison, compare
    from sgt_ds.evaluation.encoding import Encoder, TrainingEncoder
    from sgt_ds.evaluation.named import check_evaluation, named_tasks
    from sgt_ds.evaluation.perplexity import Perplexity, PerplexityProbe
    from sgt_ds.evaluation.results import (
        ItemResult,
        Score,
        TaskResult,
        check_writable,
        read_items,
        write_items,
    )
    from sgt_ds.evaluation.scoring import Logits
    from sgt_ds.evaluation.sources import HUB, Questions, load_questions
    from sgt_ds.evaluation.streams import Stream, set_streams, streams_of
    from sgt_ds.evaluation.suite import BATCH_TOKENS, Suite

_ROOMS = {
    "comparison": ("Comparison", "compare"),
    "encoding": ("Encoder", "TrainingEncoder"),
    "named": ("check_evaluation", "named_tasks"),
    "perplexity": ("Perplexity", "PerplexityProbe"),
    "results": ("ItemResult", "Score", "TaskResult", "check_writable", "read_items", "write_items"),
    "scoring": ("Logits",),
    "sources": ("HUB", "Questions", "load_questions"),
    "streams": ("Stream", "set_streams", "streams_of"),
    "suite": ("BATCH_TOKENS", "Suite"),
}
_LATER = {name: module for module, names in _ROOMS.items() for name in names}

__all__ = [
    "BATCH_TOKENS",
    "HUB",
    "METRICS",
    "RULES",
    "TASKS",
    "Comparison",
    "Encoder",
    "Item",
    "ItemResult",
    "Logits",
    "Metric",
    "Perplexity",
    "PerplexityProbe",
    "Questions",
    "Rule",
    "Score",
    "Stream",
    "Suite",
    "Task",
    "TaskResult",
    "TrainingEncoder",
    "check_evaluation",
    "check_writable",
    "compare",
    "find_tasks",
    "load_questions",
    "named_tasks",
    "read_items",
    "set_streams",
    "streams_of",
    "write_items",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
