"""From a Hugging Face LLaMA to a training start. The inverse of conversion.

What the training model computes otherwise is refused by name; what can be brought over without
changing the function (shared embeddings, grouped key-value heads, rows that pad the vocabulary) is.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sgt_ds.checkpoints import seal_start
from sgt_ds.config import ModelConfig, in_plain_words
from sgt_ds.errors import UserError, refusal
from sgt_ds.flops import parameter_count
from sgt_ds.inference.folder import quiet_transformers
from sgt_ds.inference.tokenizer import number_of_ids
from sgt_ds.inference.weights import (
    INDEX_NAME,
    cast,
    parse_size,
    plan_shards,
    read_back,
    write_index,
    write_shard,
)
from sgt_ds.inference.whole import whole_or_absent
from sgt_ds.model import VOCABULARY_TENSORS, to_llama_names
from sgt_ds.progress import Progress

_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model")
_TOKENIZER_FILES = (*_VOCABULARY_FILES, "tokenizer_config.json")
_EMBEDDING, _HEAD = VOCABULARY_TENSORS
# Older exports carry the rotary tables; they follow from the configuration.
_IGNORED_SUFFIX = "rotary_emb.inv_freq"


def import_model(
    directory: Path, out: Path, *, vocab_size: int | None = None, max_shard_size: str = "5GB"
) -> dict[str, Any]:
    """Write the model in `directory` as a training start to `out`. Returns a report.

    `vocab_size`: ids that the tokenizer has, where the model's rows are padded beyond it; without
    it the folder's tokenizer tells, and all rows count where it does not.
    Raises: UserError where the folder is no LLaMA that the training model can be, where a weight is
    missing, of another shape or not finite, or where `out` can't be written.
    """
    started = time.perf_counter()
    limit = parse_size(max_shard_size)
    if (out.exists() or out.is_symlink()) and (not out.is_dir() or any(out.iterdir())):
        raise UserError(out, None, "exists already; remove it or choose another --out")
    config = _read_config(directory)
    model = _model_of(directory, config, vocab_size)
    with _Weights(directory, config, model) as weights, whole_or_absent(out) as folder:
        size = 4 * sum(math.prod(shape) for shape in weights.shapes.values())
        shards = plan_shards(weights.shapes, "fp32", limit)
        with Progress("import", size, "B") as progress:
            for shard in shards:
                progress.advance(write_shard(folder, shard, "fp32", weights.take), shard.file)
        write_index(folder, shards, "fp32")
        with Progress("check", size, "B") as progress:
            for shard in shards:
                for name, written in read_back(folder, shard):
                    if not torch.equal(written, cast(weights.take(name), "fp32", name)):
                        raise UserError(out, name, "differs on disk from what was read; try again")
                    progress.advance(written.numel() * written.itemsize)
        for name in _TOKENIZER_FILES:
            if (directory / name).is_file():
                shutil.copyfile(directory / name, folder / name)
        (folder / "model.yaml").write_text(_model_section(model, out), encoding="utf-8")
        report = {
            "source": str(directory),
            "out": str(out),
            "parameters": parameter_count(model),
            "model": model.model_dump(mode="json"),
            "untied": bool(config.tie_word_embeddings),
            "repeated_key_value_heads": config.num_attention_heads // config.num_key_value_heads,
            "padding_rows": model.padding_rows,
            "files": [shard.file for shard in shards],
            "bytes": size,
        }
        seal_start(folder, model, {"import": report})
    return {**report, "seconds": round(time.perf_counter() - started, 3)}


class _Weights:
    """The training start's tensors by LLaMA's names, each read from the source when asked for."""

    def __init__(self, directory: Path, config: Any, model: ModelConfig) -> None:
        self._directory, self._config = directory, config
        self._files = _files_of(directory)
        if model.num_layers > len(self._files):
            raise UserError(
                directory / "config.json",
                "num_hidden_layers",
                f"is {model.num_layers}, more than there are tensors ({len(self._files)})",
            )
        with torch.device("meta"):
            blank = {name: torch.empty(shape) for name, shape in _training_shapes(model).items()}
        self.shapes = {name: tuple(t.shape) for name, t in to_llama_names(blank, model).items()}
        self._held = ExitStack()

    def __enter__(self) -> _Weights:
        self._streams = {
            file: self._held.enter_context(_opened(file)) for file in set(self._files.values())
        }
        unknown = [
            name
            for name in self._files
            if name not in self.shapes and not name.endswith(_IGNORED_SUFFIX)
        ]
        if unknown:
            raise UserError(
                self._directory,
                min(unknown),
                "has no counterpart in the training model; only LLaMA without biases can be "
                "imported",
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def take(self, name: str) -> Tensor:
        """One tensor in its source's dtype and the training model's shape. Raises: UserError."""
        config, wanted = self._config, self.shapes[name]
        source = _EMBEDDING if name == _HEAD and config.tie_word_embeddings else name
        if source not in self._files:
            raise UserError(self._directory, source, "is missing; copy all of the model's files")
        tensor: Tensor = self._streams[self._files[source]].get_tensor(source)
        expected: tuple[int, ...] = wanted
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            expected = (config.num_key_value_heads * config.head_dim, config.hidden_size)
        elif name in (_EMBEDDING, _HEAD):
            expected = (config.vocab_size, config.hidden_size)
        if tuple(tensor.shape) != expected:
            raise UserError(
                self._directory,
                source,
                f"is {tuple(tensor.shape)} where config.json says {expected}; copy it again",
            )
        if not tensor.is_floating_point():
            raise UserError(
                self._directory, source, f"is {tensor.dtype}: quantized; import the original"
            )
        if tuple(tensor.shape) == wanted:
            return tensor
        if name in (_EMBEDDING, _HEAD):
            return torch.cat((tensor, tensor.new_zeros(wanted[0] - expected[0], wanted[1])))
        # A group's queries all meet the same key and value: each has its own copy from here on.
        grouped = tensor.view(config.num_key_value_heads, config.head_dim, config.hidden_size)
        repeats = config.num_attention_heads // config.num_key_value_heads
        return grouped.repeat_interleave(repeats, 0).reshape(wanted)


def _training_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    from sgt_ds.model import Transformer

    with torch.device("meta"):
        return {n: tuple(p.shape) for n, p in Transformer(model).named_parameters()}


def _read_config(directory: Path) -> Any:
    path = directory / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(directory, None, "holds no config.json; give a model's folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(path, None, refusal(error, "read", "copy it again")) from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise UserError(path, "model_type", "is missing; give the folder of a LLaMA")
    kind = values["model_type"]
    if kind == "sgt":
        message = "would be lost; continue its run, or name a checkpoint of it as `fork`"
        raise UserError(path, "loops", message)
    if kind != "llama":
        raise UserError(
            path, "model_type", f"'{kind}' is not llama, the only one that can be trained"
        )
    if values.get("quantization_config"):
        raise UserError(path, "quantization_config", "is set; import the original weights")
    from transformers import LlamaConfig

    inner = values.get("rope_parameters") or {}
    theta = values.get("rope_theta")
    if theta is not None and isinstance(inner, dict) and inner.get("rope_theta", theta) != theta:
        raise UserError(
            path, "rope_theta", f"is {theta!r} here and {inner['rope_theta']!r} in rope_parameters"
        )
    quiet_transformers()
    try:
        return LlamaConfig.from_dict(values)
    except Exception as error:  # its validation raises classes of its own
        raise UserError(path, None, f"is not a LLaMA configuration ({error})") from None


def _model_of(directory: Path, config: Any, vocab_size: int | None) -> ModelConfig:
    """The training model's shape. Raises: UserError naming the key that it can't follow."""
    path, rope = directory / "config.json", config.rope_parameters or {}
    heads, key_value = config.num_attention_heads, config.num_key_value_heads
    for key, good, said in (
        (
            "hidden_act",
            config.hidden_act in ("silu", "swish"),
            f"'{config.hidden_act}' is not silu",
        ),
        ("attention_bias", not config.attention_bias, "is true; the training model has no biases"),
        ("mlp_bias", not config.mlp_bias, "is true; the training model has no biases"),
        (
            "rope_parameters",
            rope.get("rope_type", "default") == "default",
            f"'{rope.get('rope_type')}' scales positions; only the default can be trained",
        ),
        (
            "rope_parameters.partial_rotary_factor",
            rope.get("partial_rotary_factor", 1.0) == 1.0,
            "is not 1; the training model applies RoPE to whole heads",
        ),
        (
            "head_dim",
            config.head_dim * heads == config.hidden_size,
            f"{config.head_dim} × {heads} heads is not hidden_size {config.hidden_size}",
        ),
        (
            "num_key_value_heads",
            key_value > 0 and heads % key_value == 0,
            f"{key_value} does not divide {heads}",
        ),
    ):
        if not good:
            raise UserError(path, key, f"{said}; this model cannot be imported")
    try:
        model = ModelConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            vocab_size=config.vocab_size,
            rope_theta=rope.get("rope_theta", 10000.0),
            rms_norm_eps=config.rms_norm_eps,
        )
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else "hidden_size"
        raise UserError(path, key, in_plain_words(first)) from None
    return _of_its_ids(model, directory, vocab_size)


def _of_its_ids(model: ModelConfig, directory: Path, given: int | None) -> ModelConfig:
    """The shape with the tokenizer's ids for a vocabulary; `model` counts all rows of the source.

    `given`: the number of ids, at least those of the folder's tokenizer, which tells it otherwise.
    Raises: UserError.
    """
    known = _ids_in(directory)
    if given is not None and known is not None and given < known:
        message = f"{given} is less than the {known} ids of the folder's tokenizer; leave it out"
        raise UserError("--vocab-size", None, message)
    ids = known if given is None else given
    fitting = model.model_copy(update={"vocab_size": ids or 0})
    if fitting.vocab_size <= model.vocab_size <= fitting.padded_vocab_size:
        return fitting
    if given is None:
        return model
    raise UserError(
        "--vocab-size",
        None,
        f"{given} does not fit the model's {model.vocab_size} rows; give the number of ids its "
        "tokenizer has",
    )


def _ids_in(directory: Path) -> int | None:
    """Ids of the folder's tokenizer; None where there is none that can be read."""
    for name in _VOCABULARY_FILES:
        if (directory / name).is_file():
            with suppress(UserError, OSError):
                return number_of_ids(directory / name)
    return None


def _files_of(directory: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    index, single = directory / INDEX_NAME, directory / "model.safetensors"
    try:
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            if any(Path(file).name != file for file in names.values()):
                raise UserError(index, "weight_map", "names a file outside its folder")
            return {name: directory / file for name, file in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(index, None, refusal(error, "read", "copy it again")) from None
    if not single.is_file():
        raise UserError(
            directory, single.name, "is missing; only safetensors are read, not pickles"
        )
    with _opened(single) as stream:
        return dict.fromkeys(stream.keys(), single)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        file.open(
            "rb"
        ).close()  # safetensors takes one that may not be read for one that is not there
        stream = safe_open(file, framework="pt")
    except FileNotFoundError:
        raise UserError(file, None, "is missing; copy all of the model's files") from None
    except (OSError, SafetensorError) as error:
        raise UserError(file, None, refusal(error, "read", "copy it again")) from None
    with stream as held:
        yield held


def _model_section(model: ModelConfig, out: Path) -> str:
    """What a RUN.yaml says to begin here."""
    section = {"model": model.model_dump(mode="json"), "init": str(out)}
    return str(yaml.safe_dump(section, sort_keys=False, allow_unicode=True))
