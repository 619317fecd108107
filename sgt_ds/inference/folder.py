"""Why a model's folder does not load, in one line. Knows no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sgt_ds.errors import UserError

LOADING_FAULTS = (
    *(OSError, ValueError, RuntimeError, KeyError, ImportError, AttributeError),
    SafetensorError,
)
"""What `transformers` raises of a folder that it can't load."""
# Of these a whole folder may be the cause: of a model that runs code of its own, or of an unknown kind.
_OF_ANOTHER_KIND = (ValueError, KeyError, AttributeError)
_TOKENIZER_FILES = ("tokenizer*", "vocab.*", "merges.txt", "*.model")


def cannot_be_loaded(directory: Path, error: Exception) -> UserError:
    """The error of a folder, or of its file of weights that is cut or changed."""
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


def load_tokenizer(kind: Any, directory: Path, **settings: Any) -> Any:
    """The folder's tokenizer, by its class in `transformers`. Raises: UserError."""
    try:
        return kind.from_pretrained(directory, **settings)
    except Exception as error:  # `tokenizers` raises no narrower class
        if not any(found for pattern in _TOKENIZER_FILES for found in directory.glob(pattern)):
            raise UserError(
                directory, "tokenizer", "is missing; convert again with --tokenizer FILE"
            ) from None
        raise cannot_be_loaded(directory, error) from None


def _damaged_file(directory: Path) -> Path | None:
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError):
            return file
    return None
