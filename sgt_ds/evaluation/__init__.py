"""Evaluation of anything that gives logits: tasks, perplexity, comparisons.

Loaded part by part when first asked for: naming a task needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgt_ds.evaluation.items import METRICS, RULES, Item, Metric, Rule
from sgt_ds.evaluation.tasks import TASKS, Task, find_tasks
from sgt_ds.lazy import lazy_exports

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

__getattr__ = lazy_exports(
    __name__,
    {
        "comparison": ("Comparison", "compare"),
        "encoding": ("Encoder", "TrainingEncoder"),
        "named": ("check_evaluation", "named_tasks"),
        "perplexity": ("Perplexity", "PerplexityProbe"),
        "results": (
            "ItemResult",
            "Score",
            "TaskResult",
            "check_writable",
            "read_items",
            "write_items",
        ),
        "scoring": ("Logits",),
        "sources": ("HUB", "Questions", "load_questions"),
        "streams": ("Stream", "set_streams", "streams_of"),
        "suite": ("BATCH_TOKENS", "Suite"),
    },
)
