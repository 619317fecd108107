"""Flags that change a growth policy, and the policy defined by a journal and such flags."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgt_ds.cli.frame import Flags, Parser, real_number, whole_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sgt_ds.config import GrowthConfig, ModelConfig
    from sgt_ds.growth import Line, Policy

# Keys of `growth` that a flag of the same name overrides.
GROWTH_KEYS = (
    *("k_max", "layers", "heads", "loops", "stages", "t_start", "interval", "direction"),
    *("exclude_layers", "entropy_ema", "entry", "freeze_at"),
)
# Plain lines bring no settings at all.
_NEEDED = ("k_max", "layers", "heads", "t_start", "interval")

count = whole_number(1, 10**7)
natural = whole_number(0, 10**7)


def numbers(text: str) -> list[int]:
    """The type of a flag that takes a list: `0,1`, or `7,`."""
    return [natural(part) for part in text.split(",") if part]


def add_growth_flags(to: Flags) -> None:
    """Flags for keys of `growth`, but `--exclude-layers`, whose form is each verb's own."""
    to.add_argument("--k-max", type=count, metavar="K", help="greatest depth of a loop (K_max)")
    to.add_argument(
        "--layers",
        type=_layers,
        metavar="L",
        help="number of looping layers (L); other methods than sgt: a list, 1,7,15 or 7,",
    )
    to.add_argument("--heads", type=count, metavar="H", help="heads that loop per layer (h)")
    to.add_argument(
        "--loops", type=count, metavar="K", help="times a listed layer is re-applied; not sgt"
    )
    to.add_argument("--stages", type=numbers, help="heads left after each window: 10,2")
    to.add_argument(
        "--t-start", type=natural, metavar="T", help="updates before the first decision"
    )
    to.add_argument("--interval", type=count, metavar="D", help="updates between decisions")
    to.add_argument("--direction", choices=("d2s", "s2d"), help="order of growth")
    to.add_argument(
        "--entropy-ema",
        type=real_number(0, 1),
        help="weight of past values in the moving average of journalled entropies",
    )
    to.add_argument("--entry", choices=("decay", "none", "ramp"), help="how a loop enters")
    to.add_argument(
        "--freeze-at", type=natural, metavar="T", help="update from which nothing grows"
    )


def flag_of(key: str) -> str:
    """The flag behind a key of `growth`."""
    return "--" + key.partition(".")[0].replace("_", "-")


def add_settings(parser: Parser, *, plain_lines: bool = False) -> None:
    """Flags that change the policy; each one not given comes from the journal's header.

    `plain_lines`: where the verb also takes lines without one, which have defaults of their own.
    """
    zero = " (plain lines: 0)" if plain_lines else ""
    parser.add_argument("--method", help="growth method (default: the journal's, or sgt)")
    add_growth_flags(parser)
    parser.add_argument(
        "--exclude-layers",
        nargs="*",
        type=numbers,
        metavar="N,N",
        help=f"layers that never loop: 0,1; none: nothing behind the flag{zero}",
    )
    parser.add_argument(
        "--ema",
        dest="entropy_ema",
        type=real_number(0, 1),
        help=f"the same as --entropy-ema{zero}",
    )


def _layers(text: str) -> int | list[int]:
    return numbers(text) if "," in text else count(text)


def policy_of(
    file: Path, options: argparse.Namespace
) -> tuple[Policy, GrowthConfig, Iterator[Line], bool]:
    """Policy and settings that journal and flags ask for; the lines; whether they are its own."""
    from itertools import chain

    from sgt_ds.errors import UserError
    from sgt_ds.growth import Measurement, check_whole, journal_in, read_journal

    path = journal_in(file)
    header, lines = read_journal(path)
    given = {key: value for key in GROWTH_KEYS if (value := getattr(options, key)) is not None}
    if "exclude_layers" in given:
        given["exclude_layers"] = [layer for part in given["exclude_layers"] for layer in part]
    if header is not None:
        growing = options.method or ("sgt" if given and header.method == "vanilla" else None)
        growth = {**header.growth.model_dump(), **given}
        method = growing or header.method
        policy, settings = _build(path, method, growth, header.model, _given_keys(options, given))
        check_whole(path, header)
        return policy, settings, lines, not given and method == header.method
    try:
        first = next(lines)
    except UserError as error:
        message = f"{error.message}; a run's journal is its growth.jsonl"
        raise UserError(path, error.field, message) from None
    if not isinstance(first, Measurement):
        raise UserError(path, "line 1", "is a decision without a header; give the complete journal")
    method = options.method or "sgt"
    needed = _NEEDED if method == "sgt" else ("layers", "t_start", "interval")
    for flag in needed:
        if getattr(options, flag) is None:
            raise UserError(
                path, flag_of(flag), "is needed: plain lines carry no settings; give it"
            )
    model = _model_of_shape(len(first.entropy), len(first.entropy[0]))
    keys = _given_keys(options, given)
    policy, settings = _build(path, method, {"entropy_ema": 0.0, **given}, model, keys)
    return policy, settings, chain([first], lines), False


def check_used(file: str, method: str, given: Iterable[str]) -> None:
    """Raises: UserError of `file` where the flag of a key in `given` does nothing."""
    from sgt_ds.config import unused_key
    from sgt_ds.errors import UserError

    if found := unused_key(method, sorted(given)):
        raise UserError(file, flag_of(found[0]), found[1])


def _given_keys(options: argparse.Namespace, given: dict[str, Any]) -> frozenset[str]:
    """Keys that came by a flag; the others are the header's."""
    return frozenset(given) | ({"method"} if options.method else frozenset())


def _build(
    path: Path, method: str, growth: dict[str, Any], model: ModelConfig, given: frozenset[str]
) -> tuple[Policy, GrowthConfig]:
    """The policy, after the checks that a run's configuration passes too.

    `given`: keys that the user gave by a flag; a fault of another one is the journal's header's.
    """

    def place(key: str) -> str:
        own = key.partition(".")[0] in given
        return (
            flag_of(key) if own else f"line 1: {'method' if key == 'method' else f'growth.{key}'}"
        )

    from pydantic import ValidationError

    from sgt_ds.config import GrowthConfig, growth_faults, in_plain_words
    from sgt_ds.errors import HERE, UserError
    from sgt_ds.growth import build_policy, check_method

    check_method(method, str(path), place("method"))
    check_used(HERE, method, given)
    try:
        settings = GrowthConfig.model_validate(growth)
    except ValidationError as error:
        detail = error.errors()[0]
        message = f"{in_plain_words(detail)} (got {detail['input']!r}); correct it"
        raise UserError(path, place(str(detail["loc"][0])), message) from None
    for key, fault in growth_faults(method, settings, model):
        if method != "sgt" and place(key) == "--layers" and isinstance(settings.layers, int):
            fault = f"method {method} takes a list of layers, e.g. 1,7 or {settings.layers},"
        raise UserError(path, place(key), fault)
    return build_policy(method, settings, model), settings


def _model_of_shape(layers: int, heads: int) -> ModelConfig:
    """A model that has just the shape: no policy looks at more of it."""
    from sgt_ds.config import ModelConfig

    return ModelConfig(
        hidden_size=2 * heads,
        intermediate_size=1,
        num_layers=layers,
        num_heads=heads,
        vocab_size=1,
    )
