"""SentencePiece models and Hugging Face `tokenizers` files behind one small class.

Text in, ids out: no EOS and no BOS are added here, and special tokens spelt in a text are text.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from sgt_ds.errors import UserError, refusal
from sgt_ds.files import sha256_of

Kind = Literal["huggingface", "sentencepiece"]
Ids = npt.NDArray[np.uint32]

# A `tokenizers` file does not say which token ends a document: these names do, first found first.
EOS_NAMES = (
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|im_end|>",
    "[EOS]",
)
BOS_NAMES = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]")
PAD_NAMES = ("<|padding|>", "<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>")


class _Backend(Protocol):
    kind: Kind
    vocab_size: int

    def id_of(self, token: str) -> int | None: ...

    def special_ids(self) -> tuple[int | None, int | None, int | None]: ...

    def encode_batch(self, texts: Sequence[str]) -> Iterable[list[int]]: ...

    def bare_encoders(self) -> dict[str, Callable[[list[str]], object]]: ...

    def decode(self, ids: list[int]) -> str: ...


class Tokenizer:
    """One tokenizer file.

    `eos`: the token that ends a document, by spelling or id, where the file does not tell.
    `special_tokens`: special tokens spelt in a text become special tokens.
    Raises: UserError where the file is missing or no tokenizer, or has no EOS.
    """

    def __init__(
        self, path: Path, *, eos: str | int | None = None, special_tokens: bool = False
    ) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                head = stream.read(64)
        except FileNotFoundError:
            raise UserError(path, None, "no such tokenizer file; check the path") from None
        except OSError as error:
            raise UserError(path, None, refusal(error, "read")) from None
        self._backend: _Backend = (
            _HuggingFace(path, special_tokens)
            if head.lstrip().startswith(b"{")
            else _SentencePiece(path, special_tokens)
        )
        self.kind: Kind = self._backend.kind
        self.vocab_size = self._backend.vocab_size
        """Ids are below it."""
        self.sha256 = sha256_of(path)
        """Of the file, in hex."""
        found, self.bos_id, self.pad_id = self._backend.special_ids()
        if eos is not None:
            found = eos if isinstance(eos, int) else self._backend.id_of(eos)
        if found is None:
            what = f"has no token '{eos}'" if eos else "does not say which token ends a document"
            raise UserError(path, "eos", f"{what}; name one of its tokens with --eos")
        self.eos_id = found

    def encode_batch(
        self, texts: Sequence[str], *, bos: bool = False, eos: bool = False
    ) -> list[Ids]:
        """Ids of each text, uint32 (tokens,), on one core, with BOS and EOS where asked for."""
        found = []
        for ids in self._backend.encode_batch(texts):
            if eos:
                ids.append(self.eos_id)
            if bos and self.bos_id is not None:
                ids.insert(0, self.bos_id)
            # By way of `array`: numpy takes twice as long for a list of integers.
            found.append(np.array(array("I", ids), dtype=np.uint32))
        return found

    def encode(self, text: str) -> Ids:
        """Ids of one text, uint32 (tokens,), without BOS and EOS."""
        return self.encode_batch([text])[0]

    def bare_encoders(self) -> dict[str, Callable[[list[str]], object]]:
        """The library's own batch encodes, by name, and what they return: for a bench."""
        return self._backend.bare_encoders()

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens spelt out where the tokenizer can."""
        return self._backend.decode([int(token) for token in ids])


class _HuggingFace:
    kind: Kind = "huggingface"

    def __init__(self, path: Path, special_tokens: bool) -> None:
        import tokenizers

        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                path,
                None,
                f"is not a Hugging Face tokenizers file ({error}); give its tokenizer.json",
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = not special_tokens
        self._vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        # Ids may have gaps: the number of tokens is no bound.
        self.vocab_size = max(self._vocabulary.values(), default=-1) + 1

    def id_of(self, token: str) -> int | None:
        return self._vocabulary.get(token)

    def special_ids(self) -> tuple[int | None, int | None, int | None]:
        eos, bos, pad = (
            next((self._vocabulary[name] for name in names if name in self._vocabulary), None)
            for names in (EOS_NAMES, BOS_NAMES, PAD_NAMES)
        )
        return eos, bos, pad

    def encode_batch(self, texts: Sequence[str]) -> Iterable[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return (encoding.ids for encoding in encodings)

    def bare_encoders(self) -> dict[str, Callable[[list[str]], object]]:
        tokenizer = self._tokenizer
        return {
            "batch encode": lambda texts: tokenizer.encode_batch(texts, add_special_tokens=False),
            "batch encode without offsets": lambda texts: tokenizer.encode_batch_fast(
                texts, add_special_tokens=False
            ),
        }

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


class _SentencePiece:
    kind: Kind = "sentencepiece"

    def __init__(self, path: Path, special_tokens: bool) -> None:
        import sentencepiece

        if special_tokens:
            raise UserError(
                path, "--special-tokens", "SentencePiece never reads control tokens from a text"
            )
        self._processor: Any = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(path.read_bytes())
            self.vocab_size = int(self._processor.GetPieceSize())
        except (RuntimeError, OSError):
            self.vocab_size = 0
        if self.vocab_size == 0:
            raise UserError(
                path,
                None,
                "is neither a SentencePiece model nor a Hugging Face tokenizers file; give a "
                "tokenizer.model or a tokenizer.json",
            )

    def id_of(self, token: str) -> int | None:
        found = int(self._processor.PieceToId(token))
        return found if self._processor.IdToPiece(found) == token else None

    def special_ids(self) -> tuple[int | None, int | None, int | None]:
        eos, bos, pad = (
            int(found) if found >= 0 else None
            for found in (
                self._processor.eos_id(),
                self._processor.bos_id(),
                self._processor.pad_id(),
            )
        )
        return eos, bos, pad

    def encode_batch(self, texts: Sequence[str]) -> Iterable[list[int]]:
        found: list[list[int]] = self._processor.EncodeAsIds(list(texts), num_threads=1)
        return found

    def bare_encoders(self) -> dict[str, Callable[[list[str]], object]]:
        return {"batch encode": lambda texts: self._processor.EncodeAsIds(texts, num_threads=1)}

    def decode(self, ids: list[int]) -> str:
        return str(self._processor.DecodeIds(ids))
