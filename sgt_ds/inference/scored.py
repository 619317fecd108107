"""A model ready to be scored: an export, another Hugging Face folder, or a training checkpoint.

Code out of the folder is never run: the model's code is this package's own or that of transformers.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sgt_ds.checkpoints import being_read
from sgt_ds.errors import UserError, refusal
from sgt_ds.evaluation import Encoder, Logits, TrainingEncoder
from sgt_ds.inference.device import usable_device
from sgt_ds.inference.folder import (
    cannot_be_loaded,
    check_exported_tokenizer,
    load_tokenizer,
    loading_dtype,
    quiet_transformers,
)
from sgt_ds.inference.source import find_checkpoint, read_source, verify_source
from sgt_ds.inference.tokenizer import check_tokenizer
from sgt_ds.inference.weights import DTYPES
from sgt_ds.inference.zero import MasterWeights
from sgt_ds.model import Transformer, loop_inputs

# Kinds of model that `sgt-ds convert` writes.
_EXPORTED_MODELS = ("llama", "sgt")
# Names under which a folder keeps a plain `tokenizers` file.
_PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")


@dataclass(frozen=True)
class ScoredModel:
    """What evaluation needs of a model."""

    name: str
    logits: Logits
    encoder: Encoder
    positions: int
    """Length that it was trained at."""
    most_positions: int | None
    """How many it can take at all, where it learned a vector for each; None is without limit."""
    device: torch.device


def load_scored_model(
    directory: Path, *, tag: str | None = None, device: str | None = None, dtype: str | None = None
) -> ScoredModel:
    """Load what `directory` holds.

    `directory`: what `sgt-ds convert` wrote, any folder that stock `transformers` loads, or a
    run, its checkpoints or one of them. `tag`: which checkpoint; the newest without. `device`: as
    torch names it; None takes a GPU where there is one. `dtype`: bf16, fp16, fp32; None is that
    of the files on a GPU, float32 on a CPU and for a checkpoint.
    Raises: UserError where it can't be loaded, or has no tokenizer.
    """
    place = usable_device(device)
    if (directory / "config.json").is_file():
        if tag is not None:
            raise UserError("--tag", None, f"names a checkpoint, but {directory} is a model")
        return _from_folder(directory, place, dtype)
    path = find_checkpoint(directory, tag)
    with being_read(path):
        return _from_checkpoint(path, place, dtype)


class _FolderEncoder:
    """A folder's tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def prefix(self) -> int | None:
        first: int | None = self._tokenizer.bos_token_id
        return self.end if first is None else first

    @property
    def end(self) -> int | None:
        end: int | None = self._tokenizer.eos_token_id
        return end

    def encode(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def _from_folder(directory: Path, device: torch.device, dtype: str | None) -> ScoredModel:
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    quiet_transformers()
    kind: Any = AutoModelForCausalLM
    model_type = _read_json(directory / "config.json").get("model_type")
    if model_type == "sgt":
        from sgt_ds.inference.hf.modeling_sgt import SgtForCausalLM

        kind = SgtForCausalLM
    wanted = loading_dtype(device, dtype)
    told = directory / "tokenizer_config.json"
    is_plain = told.is_file() and _read_json(told).get("tokenizer_class") in _PLAIN_TOKENIZERS
    if is_plain or (not told.is_file() and model_type in _EXPORTED_MODELS):
        check_exported_tokenizer(directory)
    try:
        # Where it is not told, transformers asks on the terminal, and a pickle would be read.
        loaded: Any = kind.from_pretrained(
            directory, dtype=wanted, use_safetensors=True, trust_remote_code=False
        )
        model = loaded.to(device).eval()
    except Exception as error:  # of transformers, its hub, torch and safetensors
        raise cannot_be_loaded(directory, error) from None
    tokenizer_kind: Any = PreTrainedTokenizerFast if is_plain else AutoTokenizer
    tokenizer = load_tokenizer(tokenizer_kind, directory, trust_remote_code=False)
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def logits(ids: Tensor, first: int) -> Tensor:
        kept = {"logits_to_keep": ids.shape[1] - first} if keeps else {}
        answer: Tensor = model(ids, use_cache=False, **kept).logits
        return answer if keeps else answer[:, first:]

    positions = getattr(model.config, "max_position_embeddings", None) or 2048
    return ScoredModel(
        str(directory),
        logits,
        _FolderEncoder(tokenizer),
        positions,
        positions if _learns_positions(model, positions) else None,
        device,
    )


def _learns_positions(model: Any, positions: int) -> bool:
    """Whether a table beside that of the tokens has a row for each position, as GPT-2's."""
    of_tokens = model.get_input_embeddings()
    return any(
        isinstance(module, nn.Embedding)
        and module is not of_tokens
        and module.num_embeddings >= positions
        for module in model.modules()
    )


def _from_checkpoint(path: Path, device: torch.device, dtype: str | None) -> ScoredModel:
    verify_source(path)
    source = read_source(path)
    if source.tokenizer is None or not source.tokenizer.is_file():
        raise UserError(
            path,
            "tokenizer",
            f"{source.tokenizer} does not exist; convert the checkpoint with --tokenizer FILE",
        )
    check_tokenizer(source.tokenizer, source)
    weights = MasterWeights(path)
    model = Transformer(source.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if weights.shapes.get(name) != tuple(parameter.shape):
                raise UserError(path, name, "does not match the state; use another checkpoint")
            parameter.copy_(weights.read(name, 0, parameter.numel()).view(parameter.shape))
    model.to(device, DTYPES[dtype or "fp32"])
    loops = loop_inputs(source.passes, device)

    def logits(ids: Tensor, first: int) -> Tensor:
        answer: Tensor = model(ids, loops=loops).logits
        return answer[:, first:]

    return ScoredModel(
        str(path),
        logits,
        TrainingEncoder.from_file(source.tokenizer),
        source.sequence_length or 2048,
        None,
        device,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        remedy = "copy it again, or convert again"
        raise UserError(path, None, refusal(error, "read", remedy)) from None
    return values if isinstance(values, dict) else {}
