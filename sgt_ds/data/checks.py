"""Whether the sets that a configuration names are here and fit each other and the model.

Reads manifests and the sizes of shards, no token.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from sgt_ds.config import DataConfig, EvaluationConfig, ModelConfig
from sgt_ds.data.cache_limit import check_limit, make_room
from sgt_ds.data.remote import is_remote, is_remote_set
from sgt_ds.data.shard_cache import cache_root
from sgt_ds.data.shards import REMEDY
from sgt_ds.data.token_set import TokenSet, open_token_set
from sgt_ds.errors import UserError, in_field, refusal

log = logging.getLogger(__name__)

_VALIDATION = "data.validation"


def check_data(
    data: DataConfig, model: ModelConfig, evaluation: EvaluationConfig | None = None
) -> None:
    """Check that what the configuration names can train that model together.

    Makes room for it in the cache of remote sets, where that has a limit: the
    prepared sets of `evaluation` count there and don't make way.
    Raises: UserError where a set is missing or unfinished, sets were made by different tokenizers,
    the vocabulary exceeds the model's, the sequence is longer than any shard, or remote sets exceed
    the cache's limit.
    """
    sets: dict[str, TokenSet] = {}
    for key, location in _named_sets(data):
        with in_field(key):
            sets[key] = open_token_set(location, data.cache_dir)
    _check_fit(sets, model, data.sequence_length)
    if data.cache_bytes is not None:
        remote = [token_set for token_set in sets.values() if token_set.is_remote]
        for place, text in enumerate([] if evaluation is None else evaluation.perplexity):
            if is_remote_set(text.path):
                with in_field(f"evaluation.perplexity.{place}.path"):
                    remote.append(open_token_set(text.path, data.cache_dir))
        _make_room(remote, data)


def check_data_here(data: DataConfig, model: ModelConfig) -> list[tuple[str, Path]]:
    """Check as `check_data` and `check_shards` do, but only what is on this machine.

    Remote sets are not asked. Returns what is not here: keys, and the set or the first of its
    shards that is absent. Raises: UserError where what is here can't train that model.
    """
    sets: dict[str, TokenSet] = {}
    absent = []
    for key, location in _named_local_sets(data):
        if _is_absent(location):
            absent.append((key, location))
            continue
        with in_field(key):
            sets[key] = open_token_set(location)
    _check_fit(sets, model, data.sequence_length)
    for key, token_set in sets.items():
        shards = (token_set.path / entry.file for entry in token_set.manifest.shards)
        gone = next((path for path in shards if _is_absent(path)), None)
        if gone is not None:
            absent.append((key, gone))
            continue
        with in_field(key):
            check_set(token_set)
    return absent


def check_shards(data: DataConfig) -> None:
    """Look whether local sets have every shard, in its length; remote ones fetch theirs.

    Raises: UserError of the first one that is missing, may not be read or has another size. Reads
    none.
    """
    for key, location in _named_local_sets(data):
        with in_field(key):
            check_set(open_token_set(location))


def check_set(token_set: TokenSet) -> None:
    """Raises: UserError of the first shard of a local set that can't be read or has another size."""
    for entry in token_set.manifest.shards:
        _check_size(token_set.path / entry.file, entry.bytes)


def check_sequence_length(token_set: TokenSet, sequence_length: int) -> None:
    """Raises: UserError where no shard of the set holds a sequence of that length."""
    if token_set.num_sequences(sequence_length) == 0:
        longest = max(shard.tokens for shard in token_set.manifest.shards)
        raise UserError(
            token_set.name,
            "data.sequence_length",
            f"{sequence_length} needs shards of {sequence_length + 1} tokens, but the longest "
            f"here has {longest}; set {max(longest - 1, 1)} or less, or prepare larger files",
        )


def check_same_tokenizer(sets: list[TokenSet]) -> None:
    """Raises: UserError where two of the sets were made by different tokenizers."""
    for token_set in sets[1:]:
        if token_set.tokenizer_sha256 != sets[0].tokenizer_sha256:
            raise UserError(
                token_set.name,
                "tokenizer",
                f"{token_set.tokenizer_sha256[:12]}… is not that of {sets[0].name} "
                f"({sets[0].tokenizer_sha256[:12]}…); prepare both with one tokenizer",
            )


def _named_sets(data: DataConfig) -> list[tuple[str, Path | str]]:
    """The sets that a configuration trains on and validates with, and the keys that name them."""
    named = [(f"data.train.{place}.path", each.path) for place, each in enumerate(data.train)]
    if data.validation is not None:
        named.append((_VALIDATION, data.validation))
    return named


def _named_local_sets(data: DataConfig) -> list[tuple[str, Path]]:
    return [(key, Path(at)) for key, at in _named_sets(data) if not is_remote(str(at))]


def _is_absent(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # told where it is read
        return False
    return False


def _check_fit(sets: Mapping[str, TokenSet], model: ModelConfig, sequence_length: int) -> None:
    """Raises: UserError where `sets`, by their keys, don't fit each other, model or length."""
    opened = list(sets.values())
    if _VALIDATION in sets:
        _check_validation(sets[_VALIDATION], opened[0])
    for token_set in opened:
        if token_set.vocab_size > model.vocab_size:
            raise UserError(
                token_set.name,
                "vocab_size",
                f"{token_set.vocab_size} exceeds the model's {model.vocab_size}; set "
                f"model.vocab_size={token_set.vocab_size}, or prepare with a smaller tokenizer",
            )
        check_sequence_length(token_set, sequence_length)
    check_same_tokenizer(opened)


def _check_validation(validation: TokenSet, train: TokenSet) -> None:
    """Raises: UserError where different tokenizers made the sets: not for the model to fix."""
    if validation.tokenizer_sha256 != train.tokenizer_sha256:
        raise UserError(
            validation.name,
            "data.validation",
            f"was prepared with another tokenizer (vocabulary {validation.vocab_size}) than "
            f"{train.name} ({train.vocab_size}); prepare it with that one",
        )


def _check_size(path: Path, expected: int) -> None:
    try:
        with path.open("rb") as stream:  # one that may not be read would end a run hours later
            size = os.fstat(stream.fileno()).st_size
    except FileNotFoundError:
        raise UserError(path, None, f"is missing; {REMEDY}") from None
    except OSError as error:
        raise UserError(path, None, refusal(error, "read", REMEDY)) from None
    if size != expected:
        raise UserError(path, None, f"holds {size} bytes, not {expected}; {REMEDY}")


def _make_room(remote: list[TokenSet], data: DataConfig) -> None:
    """While `remote` are open: what they need is not what goes."""
    assert data.cache_bytes is not None
    check_limit(
        {one.path: sum(shard.bytes for shard in one.manifest.shards) for one in remote},
        data.cache_bytes,
    )
    root = cache_root(data.cache_dir)
    try:
        removed = make_room(root, data.cache_bytes)
    except OSError as error:
        message = refusal(error, "cleared", instead="use a directory you own")
        raise UserError(root, "data.cache_dir", message) from None
    if removed:
        log.info("data.cache_bytes: removed %d files of unused sets from %s", len(removed), root)
