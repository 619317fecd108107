"""How benches name what they time: `vanilla`, or a method and its number of extra passes."""

from __future__ import annotations

import re

from sgt_ds.errors import UserError

_METHODS = ("sgt", "attention_loop", "block_loop")


def parse_variant(text: str) -> tuple[str, int]:
    """The method and its extra passes: `vanilla` has none, `sgt:3` has three.

    Raises: UserError.
    """
    method, _, loops = text.partition(":")
    if text == "vanilla":
        return text, 0
    if method not in _METHODS or not re.fullmatch("[1-9][0-9]?", loops):
        known = ", ".join(["vanilla", *(f"{method}:K" for method in _METHODS)])
        raise UserError(
            "--variants", None, f"'{text}' is not one of {known} (K: a number of passes, from 1)"
        )
    return method, int(loops)
