"""From a ZeRO checkpoint to a folder that `transformers` loads. Needs no GPU and no other rank.

A vanilla model becomes a stock `LlamaForCausalLM`; a looping one brings its own model file. The
folder appears whole or not at all.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sgt_ds import __version__
from sgt_ds.checkpoints import being_read
from sgt_ds.errors import UserError
from sgt_ds.flops import parameter_count
from sgt_ds.inference.card import Facts, model_card
from sgt_ds.inference.source import (
    Source,
    exported_loops,
    find_checkpoint,
    read_source,
    verify_source,
)
from sgt_ds.inference.tokenizer import TokenIds, check_tokenizer, export_tokenizer
from sgt_ds.inference.weights import (
    DTYPES,
    PIECE,
    cast,
    in_pieces,
    parse_size,
    plan_shards,
    read_back,
    write_index,
    write_shard,
)
from sgt_ds.inference.whole import whole_or_absent
from sgt_ds.inference.zero import MasterWeights, bit_sum
from sgt_ds.model import VOCABULARY_TENSORS, llama_shape, to_llama_names
from sgt_ds.progress import Progress

_MODEL_FILE = Path(__file__).parent / "hf" / "modeling_sgt.py"
# `generate` of stock transformers must never pick a row that no token has.
_LARGEST_SUPPRESSED = 1024


def convert(
    checkpoint_dir: Path,
    out: Path,
    *,
    tag: str | None = None,
    dtype: str = "bf16",
    max_shard_size: str = "5GB",
    trim_vocab: bool = False,
    tokenizer: str | None = None,
) -> dict[str, Any]:
    """Convert a checkpoint of ZeRO 0, 1 or 2, saved at any world size. Returns a report.

    `checkpoint_dir`: a run directory, its checkpoints, or one checkpoint. `tag`: a checkpoint's
    name or step; the newest without it. `dtype`: bf16, fp32 or fp16. `trim_vocab`: cut the rows
    that pad the vocabulary. `tokenizer`: a file in place of the run's own, or `none`.
    Raises: UserError where the checkpoint does not verify or does not fit its model, where `out`
    exists, or where it can't be written; nothing is left of `out` then.
    """
    if dtype not in DTYPES:
        raise UserError("--dtype", None, f"'{dtype}' is not one of {', '.join(DTYPES)}")
    limit = parse_size(max_shard_size)
    if (out.exists() or out.is_symlink()) and (not out.is_dir() or any(out.iterdir())):
        raise UserError(out, None, "exists already; remove it or choose another --out")
    path = find_checkpoint(checkpoint_dir, tag)
    with being_read(path):
        return _convert(path, out, dtype, limit, trim_vocab, tokenizer)


def _convert(
    path: Path, out: Path, dtype: str, limit: int, trim_vocab: bool, tokenizer: str | None
) -> dict[str, Any]:
    started = time.perf_counter()
    source = read_source(path)
    vocabulary = _tokenizer_file(source, tokenizer)
    verify_source(source.path)
    masters = MasterWeights(source.path)
    weights = _Weights(masters, source, trim_vocab)
    loops = exported_loops(source)
    with whole_or_absent(out) as folder:
        ids = _export_tokenizer(source, folder, vocabulary)
        config = _config(source, loops, ids, dtype, weights.vocab_size)
        _check_shapes(source, config, weights.shapes)
        shards = plan_shards(weights.shapes, dtype, limit)
        size = sum(math.prod(shape) for shape in weights.shapes.values()) * DTYPES[dtype].itemsize
        with Progress("convert", size, "B") as progress:
            for shard in shards:
                progress.advance(write_shard(folder, shard, dtype, weights.take), shard.file)
        write_index(folder, shards, dtype)
        checksum = masters.bit_sum()
        if weights.taken != checksum:
            raise UserError(
                source.path,
                None,
                "the weights do not match the checksum of the partitions; use another checkpoint",
            )
        with Progress("check", size, "B") as progress:
            for shard in shards:
                for name, written in read_back(folder, shard):
                    _check_tensor(source, name, written, weights, dtype)
                    progress.advance(written.numel() * written.itemsize)
        _write_configs(folder, config, ids, weights.vocab_size)
        facts = _facts(source, config, loops, dtype, f"{checksum:016x}", out.name)
        (folder / "README.md").write_text(model_card(facts), encoding="utf-8")
    return {
        "checkpoint": str(source.path),
        "out": str(out),
        "model_type": config.model_type,
        "method": source.method,
        "step": source.step,
        "dtype": dtype,
        "parameters": facts.parameters,
        "vocab_size": weights.vocab_size,
        "padding_rows": weights.vocab_size - source.model.vocab_size,
        "loops": loops,
        "entering": facts.entering,
        "tokenizer": ids is not None,
        "files": [shard.file for shard in shards],
        "bytes": size,
        "world_size": masters.world_size,
        "checksum": facts.checksum,
        "seconds": round(time.perf_counter() - started, 3),
    }


class _Weights:
    """The export's tensors by LLaMA's names, each read from the partitions when it is asked for.

    `taken`: 32-bit words of all elements handed out by `take`, modulo 2^64, cut rows included.
    """

    def __init__(self, masters: MasterWeights, source: Source, trim_vocab: bool) -> None:
        self._masters, self._source = masters, source
        self._ranges = _ranges(masters.shapes, source)
        self.vocab_size = source.model.padded_vocab_size
        if trim_vocab:
            self.vocab_size = source.model.vocab_size
        self.shapes = {
            name: self._trimmed(name, shape) for name, (_, _, shape) in self._ranges.items()
        }
        self.taken = 0

    def take(self, name: str) -> Tensor:
        """One tensor, float32, counted into `taken`. Raises: UserError where it is all zeros."""
        parameter, start, shape = self._ranges[name]
        values = self._masters.read(parameter, start, math.prod(shape))
        self.taken = (self.taken + bit_sum(values)) % (1 << 64)
        if not any(bool(piece.any()) for piece in in_pieces(values)):
            raise UserError(self._source.path, parameter, "is all zeros; use another checkpoint")
        return values.view(shape)[: self.shapes[name][0]]

    def pieces(self, name: str) -> Iterator[Tensor]:
        """The same tensor, flat, a piece at a time, not counted."""
        parameter, start, _ = self._ranges[name]
        count = math.prod(self.shapes[name])
        for at in range(0, count, PIECE):
            yield self._masters.read(parameter, start + at, min(PIECE, count - at))

    def _trimmed(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.vocab_size, *shape[1:]) if name in VOCABULARY_TENSORS else shape


def _ranges(
    shapes: Mapping[str, tuple[int, ...]], source: Source
) -> dict[str, tuple[str, int, tuple[int, ...]]]:
    """Where each exported tensor lies: parameter, flat index in it, shape.

    The mapping of names is asked with tensors that have a shape and no memory; what it returns are
    views of them, and a view knows its parameter and its offset.
    """
    blank = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    names = {id(tensor): name for name, tensor in blank.items()}
    try:
        named = to_llama_names(blank, source.model)
    except KeyError as error:
        raise _misfit(source, f"lacks {error.args[0]}") from None
    except (RuntimeError, ValueError, IndexError) as error:
        raise _misfit(source, " ".join(str(error).split())) from None
    ranges = {}
    for name, view in named.items():
        base = view if id(view) in names else view._base
        if base is None or not view.is_contiguous():
            raise AssertionError(f"{name} is not a contiguous part of one parameter")
        ranges[name] = (names[id(base)], int(view.storage_offset()), tuple(view.shape))
    if sum(math.prod(shape) for _, _, shape in ranges.values()) != sum(
        map(math.prod, shapes.values())
    ):
        unknown = sorted(shapes.keys() - {parameter for parameter, _, _ in ranges.values()})
        raise _misfit(source, f"has weights that the model lacks: {', '.join(unknown)}")
    return ranges


def _misfit(source: Source, reason: str) -> UserError:
    return UserError(
        source.path, None, f"does not match the architecture in its state.json: it {reason}"
    )


def _tokenizer_file(source: Source, given: str | None) -> Path | None:
    path = source.tokenizer if given is None else None if given == "none" else Path(given)
    if path is not None and not path.is_file():
        fault = "is a directory" if path.is_dir() else "does not exist"
        raise UserError(path, "tokenizer", f"{fault}; give --tokenizer FILE, or none to omit it")
    if path is not None:
        check_tokenizer(path, source)
    return path


def _export_tokenizer(source: Source, folder: Path, path: Path | None) -> TokenIds | None:
    if path is None:
        return None
    return export_tokenizer(
        path,
        folder,
        vocab_size=source.model.vocab_size,
        sequence_length=source.sequence_length or _default_length(),
    )


def _default_length() -> int:
    from transformers import LlamaConfig

    return int(LlamaConfig().max_position_embeddings)


def _config(
    source: Source,
    loops: dict[str, dict[str, Any]],
    ids: TokenIds | None,
    dtype: str,
    vocab_size: int,
) -> Any:
    """The export's `LlamaConfig`, or `SgtConfig` where a layer loops."""
    from transformers import LlamaConfig

    values = llama_shape(source.model) | {
        "vocab_size": vocab_size,
        "max_position_embeddings": source.sequence_length or _default_length(),
        "bos_token_id": None if ids is None else ids.bos,
        "eos_token_id": None if ids is None else ids.eos,
        "pad_token_id": None if ids is None else ids.pad,
        "dtype": str(DTYPES[dtype]).removeprefix("torch."),
    }
    if not loops:
        return LlamaConfig(architectures=["LlamaForCausalLM"], **values)
    from sgt_ds.inference.hf.modeling_sgt import SgtConfig

    code = {
        "AutoConfig": "modeling_sgt.SgtConfig",
        "AutoModel": "modeling_sgt.SgtModel",
        "AutoModelForCausalLM": "modeling_sgt.SgtForCausalLM",
    }
    # Servers load the class of this name from `transformers` itself: the one that follows auto_map.
    architectures = ["AutoModelForCausalLM"]
    return SgtConfig(loops=loops, architectures=architectures, auto_map=code, **values)


def _check_shapes(source: Source, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Every tensor that the class which will load them has, in its shape, and no other."""
    from transformers import LlamaForCausalLM

    from sgt_ds.inference.hf.modeling_sgt import SgtForCausalLM

    kind = SgtForCausalLM if config.model_type == "sgt" else LlamaForCausalLM
    with torch.device("meta"):
        wanted = {name: tuple(t.shape) for name, t in kind(config).state_dict().items()}
    for name in sorted(wanted.keys() | shapes.keys()):
        if wanted.get(name) != shapes.get(name):
            raise _misfit(source, f"has {name} as {shapes.get(name)}, not {wanted.get(name)}")


def _check_tensor(
    source: Source, name: str, written: Tensor, weights: _Weights, dtype: str
) -> None:
    same = written.dtype == DTYPES[dtype] and tuple(written.shape) == weights.shapes[name]
    if not same or not all(
        torch.equal(piece, cast(master, dtype, name))
        for piece, master in zip(in_pieces(written), weights.pieces(name), strict=True)
    ):
        raise UserError(source.path, name, "differs on disk from the partitions; try again")


def _write_configs(folder: Path, config: Any, ids: TokenIds | None, vocab_size: int) -> None:
    from transformers import GenerationConfig

    (folder / "config.json").write_text(config.to_json_string(use_diff=False), encoding="utf-8")
    if config.model_type == "sgt":
        shutil.copyfile(_MODEL_FILE, folder / _MODEL_FILE.name)
    values: dict[str, Any] = {}
    if ids is not None:
        values = {
            "bos_token_id": ids.bos,
            "eos_token_id": ids.eos,
            "pad_token_id": ids.eos if ids.pad is None else ids.pad,
        }
        if 0 < vocab_size - ids.size <= _LARGEST_SUPPRESSED:
            values["suppress_tokens"] = list(range(ids.size, vocab_size))
    generation = GenerationConfig(
        **{key: value for key, value in values.items() if value is not None}
    )
    (folder / "generation_config.json").write_text(generation.to_json_string(), encoding="utf-8")


def _facts(
    source: Source,
    config: Any,
    loops: dict[str, dict[str, Any]],
    dtype: str,
    checksum: str,
    name: str,
) -> Facts:
    versions = f"sgt-ds {__version__}, from a checkpoint of {source.versions}"
    return Facts(
        name=name,
        model=source.model,
        model_type=config.model_type,
        method=source.method,
        step=source.step,
        parameters=parameter_count(source.model),
        dtype=dtype,
        checksum=checksum,
        loops=loops,
        entering=any("scale" in loop for loop in loops.values()),
        tokens=source.tokens,
        sequence_length=source.sequence_length,
        flops=source.flops,
        versions=versions,
    )
