"""A SentencePiece model as a Hugging Face tokenizer with the same ids. Knows no checkpoint.

Reads the model file's own format (protocol buffers, fields of `sentencepiece_model.proto`) with a
reader of a dozen lines: the generated classes would pull in a dependency for one message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sgt_ds.errors import UserError, refusal

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_UNIGRAM, _BPE = 1, 2
_SPACE = "▁"


def tokenizer_of(path: Path) -> Any:
    """The `tokenizers.Tokenizer` that gives the ids of the SentencePiece model in `path`.

    Unigram and BPE models, with byte fallback. User-defined symbols keep their ids, but spaces next
    to one may be cut otherwise.
    Raises: UserError where the file is no such model.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers.pre_tokenizers import Metaspace

    try:
        fields = list(_fields(path.read_bytes()))
        pieces = [_piece(value) for number, value in fields if number == 1]
        trainer = dict(_fields(_last(fields, 2, b"")))
        rules = dict(_fields(_last(fields, 3, b"")))
        kind = trainer.get(3, _UNIGRAM)
    except OSError as error:
        raise UserError(path, None, refusal(error, "read")) from None
    except (IndexError, KeyError, ValueError, TypeError, struct.error) as error:
        raise UserError(
            path,
            None,
            f"is not a SentencePiece model ({error}); give one, or a Hugging Face tokenizers JSON",
        ) from None
    if kind not in (_UNIGRAM, _BPE) or not pieces:
        raise UserError(path, "model_type", "is neither unigram nor bpe; train one of these")
    kinds = [kind for _, _, kind in pieces]
    unknown = kinds.index(_UNKNOWN) if _UNKNOWN in kinds else None
    fallback = _BYTE in kinds
    if kind == _UNIGRAM:
        scored = [(text, score) for text, score, _ in pieces]
        model: Any = models.Unigram(scored, unknown, fallback)
    else:
        vocabulary = {text: index for index, (text, _, _) in enumerate(pieces)}
        model = models.BPE(
            vocab=vocabulary,
            merges=_merges(pieces),
            unk_token=None if unknown is None else pieces[unknown][0],
            fuse_unk=True,
            byte_fallback=fallback,
        )
    tokenizer = Tokenizer(model)
    steps: list[Any] = [normalizers.Precompiled(rules[2])] if rules.get(2) else []
    if rules.get(4, 1):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    elif rules.get(3, 1):
        # SentencePiece puts its space before a leading one as well, Metaspace does not.
        steps.append(normalizers.Replace(Regex("^ "), "  "))
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    prefixed = bool(rules.get(3, 1))
    # Not split at spaces: where SentencePiece may build pieces over them, so must this.
    tokenizer.pre_tokenizer = Metaspace(
        replacement=_SPACE, prepend_scheme="always" if prefixed else "never", split=False
    )
    unescape = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence([*unescape, *strip])
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text, _, k in pieces if k == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text, _, k in pieces if k == _USER_DEFINED]
    )
    return tokenizer


def _merges(pieces: list[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """Every way to build a piece of two others; the piece of higher score first."""
    known = {text for text, _, kind in pieces if kind in (_NORMAL, _USER_DEFINED)}
    ordered = sorted((p for p in pieces if p[2] == _NORMAL), key=lambda piece: -piece[1])
    return [
        (text[:cut], text[cut:])
        for text, _, _ in ordered
        for cut in range(1, len(text))
        if text[:cut] in known and text[cut:] in known
    ]


def _piece(message: bytes) -> tuple[str, float, int]:
    fields = dict(_fields(message))
    return fields[1].decode(), struct.unpack("<f", fields.get(2, bytes(4)))[0], fields.get(3, 1)


def _last(fields: list[tuple[int, Any]], number: int, default: Any) -> Any:
    return next((value for field, value in reversed(fields) if field == number), default)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Fields of one message: number and value, an int or the bytes of a fixed or delimited one."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(message, position)
            yield number, value
            continue
        if wire == 2:
            size, position = _varint(message, position)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if position + size > len(message):
            raise ValueError("a field reaches past the end")
        yield number, message[position : position + size]
        position += size


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
