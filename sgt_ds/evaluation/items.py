"""One question: context texts, texts to score, the right choice. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Rule = Literal["olmo", "lm_eval"]
"""Whose prompt, tokenisation and normalisation: OLMo's in-loop evaluation, or
lm-evaluation-harness."""
RULES: tuple[Rule, ...] = get_args(Rule)

Metric = Literal["acc", "acc_norm", "bpb"]
"""acc: the likeliest choice is the right one. acc_norm: the likeliest per character is.
bpb: bits per byte of the right choice."""
METRICS: tuple[Metric, ...] = get_args(Metric)


@dataclass(frozen=True, slots=True)
class Item:
    """One question with its choices. Contexts and continuations are joined without a space."""

    id: str
    """As the data set names it, else the row's number."""
    contexts: tuple[str, ...]
    """What stands before each choice; most tasks repeat one text."""
    continuations: tuple[str, ...]
    """What is scored, one a choice, with its leading space."""
    answer: int
    """The right choice."""


def asked(id: str, context: str, choices: list[str], answer: int) -> Item:
    """An item with one context and a space before each choice."""
    return Item(id, (context,) * len(choices), tuple(f" {choice}" for choice in choices), answer)
