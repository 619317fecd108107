"""What a run is scored on while it trains. Knows no task by name and no file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from sgt_ds.config.model import Section


class TaskSource(Section):
    """One task of the evaluation in the loop."""

    name: str = Field(min_length=1)
    """As `sgt-ds eval tasks` names it."""
    path: str = Field(min_length=1)
    """Its rows: a file, a folder with SPLIT.jsonl or TASK/SPLIT.jsonl, a URL, or `datasets`."""
    split: str = "validation"
    """Which part of the data set."""
    limit: PositiveInt | None = None
    """Only the first so many items."""


class TextSource(Section):
    """One text of the evaluation in the loop."""

    name: str = Field(min_length=1)
    """What it is called in metrics."""
    path: str = Field(min_length=1)
    """A prepared set, or files of text or JSON Lines."""
    tokens: PositiveInt = 1 << 18
    """How much of it is read, at most."""


class EvaluationConfig(Section):
    """Tasks and texts that a run is scored on, apart from its validation loss."""

    every: PositiveInt = 1000
    """Updates between two evaluations; the last update is evaluated too."""
    rule: Literal["olmo", "lm_eval"] = "olmo"
    """Whose prompts, tokenisation and normalisation the tasks follow."""
    tasks: list[TaskSource] = []
    """Multiple-choice tasks."""
    perplexity: list[TextSource] = []
    """Texts whose loss and bits per byte are measured, in windows of the training length."""
    batch_tokens: PositiveInt = 8192
    """Padded tokens of one forward pass on one rank."""
