"""Items to requests: how each rule splits a question into tokens. Knows a tokenizer, no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from sgt_ds.data import SET_MANIFEST, Tokenizer, TokenSet, open_token_set
from sgt_ds.errors import UserError
from sgt_ds.evaluation.scoring import Request, request
from sgt_ds.evaluation.sources import Questions


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    @property
    def prefix(self) -> int | None:
        """The token that begins a text, or else the one that ends one; None without either."""
        ...

    @property
    def end(self) -> int | None:
        """The token that ends a text; None without one."""
        ...

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of a text; `special`: with the special tokens that the tokenizer adds to a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        ...


class TrainingEncoder:
    """The tokenizer of a training run, which adds no special token to a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def from_file(cls, path: Path) -> TrainingEncoder:
        """Of a tokenizer file, with the roles of ids that a prepared set beside it tells.

        Raises: UserError where it is none.
        """
        if (path.parent / SET_MANIFEST).is_file():
            return cls.of_set(open_token_set(path.parent))
        return cls(Tokenizer(path))

    @classmethod
    def of_set(cls, token_set: TokenSet) -> TrainingEncoder:
        """The tokenizer of a prepared set."""
        entry = token_set.manifest.tokenizer
        return cls(Tokenizer(token_set.tokenizer_file, eos=entry.eos_id))

    @property
    def sha256(self) -> str:
        """Of its file, in hex."""
        return self._tokenizer.sha256

    @property
    def prefix(self) -> int | None:
        """The token that begins a text: BOS, else EOS."""
        bos = self._tokenizer.bos_id
        return self._tokenizer.eos_id if bos is None else bos

    @property
    def end(self) -> int:
        """EOS."""
        return self._tokenizer.eos_id

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of a text."""
        return [int(token) for token in self._tokenizer.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return self._tokenizer.decode(ids)


def requests_of(questions: Questions, encoder: Encoder, positions: int) -> Iterator[Request]:
    """One request a choice, in order of items and choices.

    `positions`: the longest input; a longer context loses its beginning.
    Raises: UserError where a choice alone is longer, or has no token.
    """
    cut = _apart if questions.rule == "olmo" else _together
    for item in questions.items:
        for context, continuation in zip(item.contexts, item.continuations, strict=True):
            pair = cut(encoder, context, continuation)
            try:
                yield request(*pair, positions)
            except ValueError as error:
                raise UserError(
                    questions.task.name,
                    f"item {item.id}",
                    f"{error}; leave the task out, or score a model of longer sequences",
                ) from None


def _apart(encoder: Encoder, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """OLMo: each text by itself, without special tokens."""
    front = encoder.encode(context, special=False) or _prefix(encoder)
    return front, encoder.encode(continuation, special=False)


def _together(encoder: Encoder, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """lm-evaluation-harness: the whole text, cut where the context's own tokens end.

    Spaces at the context's end go with the continuation, as tokens that begin a word hold them.
    """
    kept = context.rstrip()
    if not kept:
        return _prefix(encoder), encoder.encode(context + continuation, special=False)
    front = encoder.encode(kept, special=True)
    return front, encoder.encode(context + continuation, special=True)[len(front) :]


def _prefix(encoder: Encoder) -> list[int]:
    if encoder.prefix is None:
        raise UserError("tokenizer", None, "has no BOS or EOS token")
    return [encoder.prefix]
