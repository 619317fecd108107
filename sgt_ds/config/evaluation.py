"""What a run is scored on during training. Knows no task by name and no file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from sgt_ds.config.model import Section


class TaskSource(Section):
    """One task of the evaluation in the loop."""

    name: str = Field(min_length=1)
    """Task name, as for `sgt-ds eval tasks`."""
    path: str = Field(min_length=1)
    """Where its rows are: a file, a folder with SPLIT.jsonl or TASK/SPLIT.jsonl, a URL, or `datasets`."""
    split: str = "validation"
    """Split of the data set."""
    limit: PositiveInt | None = None
    """Use only the first N items; null uses all."""


class TextSource(Section):
    """One text of the evaluation in the loop."""

    name: str = Field(min_length=1)
    """Name of the text in metrics."""
    path: str = Field(min_length=1)
    """A prepared set, or text or JSON Lines files."""
    tokens: PositiveInt = 1 << 18
    """Maximum number of tokens read from it."""


class EvaluationConfig(Section):
    """Tasks and texts that a run is scored on, apart from its validation loss."""

    every: PositiveInt = 1000
    """Updates between evaluations; the last update is evaluated too, but not that of a stop."""
    rule: Literal["olmo", "lm_eval"] = "olmo"
    """Rule that the tasks follow for prompts, tokenisation and normalisation."""
    tasks: list[TaskSource] = []
    """Multiple-choice tasks."""
    perplexity: list[TextSource] = []
    """Texts on which loss and bits per byte are measured, in windows of the training length."""
    batch_tokens: PositiveInt = 8192
    """Padded tokens of one forward pass on one rank."""
