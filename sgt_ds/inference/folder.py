"""Why a model's folder does not load, in one line. Knows no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sgt_ds.errors import UserError, refusal
from sgt_ds.inference.weights import DTYPES

# Of these a whole folder may be the cause: of a model that runs code of its own, or of an unknown
# kind.
_OF_ANOTHER_KIND = (ValueError, KeyError, AttributeError)
# What every export with a tokenizer holds: its words, and which ids begin and end a text.
_EXPORTED_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_TOKENIZER_FILES = ("tokenizer*", "vocab.*", "merges.txt", "*.model")


def quiet_transformers() -> None:
    """No progress bars and no advice: what is wrong is said in one line, by this package."""
    from transformers.utils import logging as verbosity

    verbosity.set_verbosity_error()
    verbosity.disable_progress_bar()


def loading_dtype(device: torch.device, dtype: str | None) -> torch.dtype | str:
    """`dtype` by its short name; by default the folder's own, on a CPU float32: halves are slow."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else "auto"
    return DTYPES[dtype]


def cannot_be_loaded(directory: Path, error: Exception) -> UserError:
    """The error of a folder, or of its file of weights that is cut or changed."""
    refused = _refused_file(directory) or error
    if isinstance(refused, OSError) and refused.errno is not None:
        message = refusal(refused, "loaded", "copy it again, or convert again")
        return UserError(refused.filename or directory, None, message)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    damaged = _damaged_file(directory) if isinstance(error, SafetensorError) else None
    remedy = "; copy it again, or convert again"
    if isinstance(error, torch.OutOfMemoryError):
        remedy = "; use --dtype bf16, or --device cpu"
    elif isinstance(error, ImportError):
        remedy = "; install the package"
    elif isinstance(error, _OF_ANOTHER_KIND) and not isinstance(error, json.JSONDecodeError):
        remedy = ""  # what transformers says is all that is known
    return UserError(damaged or directory, None, f"cannot be loaded ({lines[0]}){remedy}")


def check_exported_tokenizer(directory: Path) -> None:
    """Raises: UserError where a tokenizer file is missing that every export holds.

    Of the others transformers would make a tokenizer that knows no end, or another one.
    """
    for name in _EXPORTED_TOKENIZER:
        if not (directory / name).is_file():
            raise _missing(directory, name)


def load_tokenizer(kind: Any, directory: Path, **settings: Any) -> Any:
    """The folder's tokenizer, by its class in `transformers`. Raises: UserError."""
    try:
        return kind.from_pretrained(directory, **settings)
    except Exception as error:  # `tokenizers` raises no narrower class
        if not any(found for pattern in _TOKENIZER_FILES for found in directory.glob(pattern)):
            raise _missing(directory, _EXPORTED_TOKENIZER[0]) from None
        raise cannot_be_loaded(directory, error) from None


def _missing(directory: Path, name: str) -> UserError:
    remedy = "copy all of the model's files, or convert again with --tokenizer FILE"
    return UserError(directory, name, f"is missing; {remedy}")


def _refused_file(directory: Path) -> OSError | None:
    """Why a file of weights may not be read, which safetensors calls missing."""
    for file in sorted(directory.glob("*.safetensors")):
        try:
            file.open("rb").close()
        except OSError as error:
            return error
    return None


def _damaged_file(directory: Path) -> Path | None:
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError):
            return file
    return None
