"""A small template language: `[one|another]` is a choice, `{slot.attribute}` a value.

Knows no story. Choices nest; a template is parsed once and expanded many times.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from functools import cache

# The text's first letter, and one after the end of a sentence (`!" he said` goes on).
SENTENCE_START = re.compile(r'(?:^|(?<=[.!?] )|(?<=[.!?]" ")|(?<=\n))"?[a-z]')

# A parsed template is a sequence of literals, slots and choices between sequences.
Slot = tuple[str, ...]


class Choice(tuple["Sequence_", ...]):
    """Alternatives, of which an expansion takes one."""


Sequence_ = tuple["str | Slot | Choice", ...]


def expand(template: str, slots: Mapping[str, object], rng: random.Random) -> str:
    """One text that the template allows; every sentence in it begins with a capital.

    Raises: KeyError or AttributeError for an unknown slot, ValueError for unbalanced brackets.
    """
    parts: list[str] = []
    _write(_parse(template), slots, rng, parts)
    return SENTENCE_START.sub(lambda match: match[0].upper(), "".join(parts))


def _write(
    sequence: Sequence_, slots: Mapping[str, object], rng: random.Random, parts: list[str]
) -> None:
    for item in sequence:
        if isinstance(item, str):
            parts.append(item)
        elif isinstance(item, Choice):
            # random() rather than choice(): a third of the time, and it is called a million times.
            _write(item[int(rng.random() * len(item))], slots, rng, parts)
        else:
            value = slots[item[0]]
            for attribute in item[1:]:
                value = getattr(value, attribute)
            parts.append(str(value))


@cache
def _parse(template: str) -> Sequence_:
    sequence, end = _parse_sequence(template, 0)
    if end != len(template):
        raise ValueError(f"unbalanced brackets in {template!r}")
    return sequence


def _parse_sequence(template: str, position: int) -> tuple[Sequence_, int]:
    """Parse up to the `|` or `]` that ends the sequence, or to the template's end."""
    items: list[str | Slot | Choice] = []
    start = position
    while position < len(template) and template[position] not in "|]":
        if template[position] not in "[{":
            position += 1
            continue
        items.append(template[start:position])
        if template[position] == "{":
            end = template.index("}", position)
            items.append(tuple(template[position + 1 : end].split(".")))
            position = end + 1
        else:
            options: list[Sequence_] = []
            while template[position] in "[|":
                option, position = _parse_sequence(template, position + 1)
                if position >= len(template):
                    raise ValueError(f"unbalanced brackets in {template!r}")
                options.append(option)
            items.append(Choice(options))
            position += 1
        start = position
    items.append(template[start:position])
    return tuple(item for item in items if item != ""), position
