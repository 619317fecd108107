"""The run's tokenizer as files that `AutoTokenizer` loads. Knows no weights and no growth."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgt_ds.errors import UserError, refusal
from sgt_ds.files import sha256_of
from sgt_ds.inference.spm import tokenizer_of

if TYPE_CHECKING:
    from sgt_ds.inference.source import Source

# Names that end a text, begin one or fill a batch, in the order in which they are tried where the
# prepared set doesn't say.
_END = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|eos|>")
_BEGIN = ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<|bos|>")
_FILL = ("<|padding|>", "<pad>", "[PAD]", "<|pad|>")


@dataclass(frozen=True)
class TokenIds:
    """Ids with a role, None where the tokenizer has none. `size`: ids that the tokenizer has."""

    size: int
    eos: int | None
    bos: int | None
    pad: int | None


def export_tokenizer(path: Path, out: Path, *, vocab_size: int, sequence_length: int) -> TokenIds:
    """Write tokenizer files into `out`.

    `path`: the file that a prepared data set holds: a SentencePiece model, or the JSON of Hugging
    Face `tokenizers`. Where the set's manifest lies beside it, roles of ids are taken from there.
    As in training, no special token is added to a text. A batch is padded on the left, with the end
    token where the tokenizer has no filler.
    Raises: UserError where the file is neither, or has more ids than the model; OSError.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = _read(path)
    told: dict[str, bool] = {}
    if not _is_json(path):
        shutil.copyfile(path, out / "tokenizer.model")
        # For converters that read the model file: they would put a space and BOS before each text.
        spaced = tokenizer.pre_tokenizer.prepend_scheme == "always"
        told = {"add_prefix_space": spaced, "add_bos_token": False, "add_eos_token": False}
    size = _size(tokenizer)
    if size > vocab_size:
        raise UserError(
            path,
            "tokenizer",
            f"has {size} ids but the model has {vocab_size}; give the run's tokenizer",
        )
    ids = _ids(path, tokenizer, size)
    names = {
        f"{role}_token": tokenizer.id_to_token(index)
        for role, index in (
            ("eos", ids.eos),
            ("bos", ids.bos),
            ("pad", ids.eos if ids.pad is None else ids.pad),
        )
        if index is not None
    }
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=sequence_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **names,
    )
    try:
        fast.save_pretrained(out)
    except Exception as error:
        if type(error) is not Exception:
            raise
        # `tokenizers` raises no narrower class of a full disk either.
        raise OSError(str(error).partition(" (os error")[0]) from None
    if told:
        file = out / "tokenizer_config.json"
        written = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**written, **told}, indent=2) + "\n", encoding="utf-8")
    return ids


def check_tokenizer(path: Path, source: Source) -> None:
    """Hold the file `path` against what is known of the tokenizer that the model was trained with.

    A checkpoint tells its digest and how many ids it has; its words are known as long as the run's
    own file is still that one. Older checkpoints tell nothing. Raises: UserError where it is
    another.
    """
    sha256, ids, own = source.tokenizer_sha256, source.tokenizer_ids, source.tokenizer
    if sha256 is None or _digest(path) == sha256:
        return
    given = _read(path)
    if own is not None and own.is_file() and _digest(own) == sha256:
        fault = _difference(_words(given), _words(_read(own)))
        remedy = "omit --tokenizer to use the run's own"
    else:
        size = _size(given)
        fault = "" if ids in (None, size) else f"has {size:,} ids, not {ids:,}"
        if not fault and own is not None and path.resolve() == own.resolve():
            fault = "has other content"  # what it held is gone, but not its checksum
        remedy = "pass a copy of that one to `sgt-ds convert --tokenizer`"
    if fault:
        raise UserError(
            path, "tokenizer", f"{fault}, unlike the one the model was trained with; {remedy}"
        )


def number_of_ids(path: Path) -> int:
    """How many ids the tokenizer in a file has. Raises: UserError where it is none."""
    return _size(_read(path))


def _difference(given: dict[int, str], trained: dict[int, str]) -> str:
    if len(given) != len(trained):
        return f"has {len(given):,} ids, not {len(trained):,}"
    others = (number for number in sorted(trained) if given.get(number) != trained[number])
    other = next(others, None)
    if other is None:
        return ""
    return f"has {given.get(other)!r} for id {other}, not {trained[other]!r}"


def _words(tokenizer: Any) -> dict[int, str]:
    return {number: word for word, number in tokenizer.get_vocab(with_added_tokens=True).items()}


def _read(path: Path) -> Any:
    """The `tokenizers.Tokenizer` of a file; it adds, cuts and fills nothing. Raises: UserError."""
    from tokenizers import Tokenizer

    if _is_json(path):
        try:
            tokenizer = Tokenizer.from_file(str(path))
            if tokenizer.encode("a").ids != tokenizer.encode("a", add_special_tokens=False).ids:
                tokenizer.post_processor = None
        except Exception as error:  # `tokenizers` raises no narrower class
            raise UserError(
                path, "tokenizer", f"is not a tokenizer ({error}); give another"
            ) from None
    else:
        tokenizer = tokenizer_of(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _digest(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        message = refusal(error, "read", instead="give --tokenizer FILE")
        raise UserError(path, "tokenizer", message) from None


def _size(tokenizer: Any) -> int:
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _is_json(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(64).lstrip().startswith(b"{")


def _ids(path: Path, tokenizer: Any, size: int) -> TokenIds:
    manifest = path.parent / "manifest.json"
    try:
        entry = json.loads(manifest.read_text(encoding="utf-8"))["tokenizer"]
        if entry["file"] == path.name:
            return TokenIds(size, entry["eos_id"], entry["bos_id"], entry["pad_id"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # the file was moved out of its set, or given by hand

    def first(names: tuple[str, ...]) -> int | None:
        found = (tokenizer.token_to_id(name) for name in names)
        return next((index for index in found if index is not None), None)

    return TokenIds(size, first(_END), first(_BEGIN), first(_FILL))
