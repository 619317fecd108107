"""The model in LLaMA's names: shape, and weights there and back. Knows no file and no module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sgt_ds.config import ModelConfig

VOCABULARY_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")
"""LLaMA's embedding and output matrix, whose rows are the vocabulary's."""

_WHOLE = {
    "embedding.weight": VOCABULARY_TENSORS[0],
    "norm.weight": "model.norm.weight",
    "lm_head.weight": VOCABULARY_TENSORS[1],
}
_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "down.weight": "mlp.down_proj.weight",
}


def llama_shape(config: ModelConfig) -> dict[str, Any]:
    """The model's shape as `LlamaConfig` takes it, by its names; the vocabulary is padded."""
    return {
        "vocab_size": config.padded_vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "head_dim": config.head_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "initializer_range": config.init_std,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }


def to_llama_names(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The model's weights under `LlamaForCausalLM`'s names and shapes, dtypes as given.

    Rows of the vocabulary stay padded. Results may share memory with `tensors`.
    Raises: KeyError naming a weight that is missing.
    """
    named = {theirs: tensors[ours] for ours, theirs in _WHOLE.items()}
    width = config.hidden_size
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        for own, other in _BLOCK.items():
            named[theirs + other] = tensors[ours + own]
        for index, letter in enumerate("qkv"):
            rows = tensors[ours + "qkv.weight"][index].reshape(width, width)
            named[f"{theirs}self_attn.{letter}_proj.weight"] = rows
        columns = tensors[ours + "output.weight"].reshape(width, width)
        named[theirs + "self_attn.o_proj.weight"] = columns
        gate, up = tensors[ours + "gate_up.weight"].chunk(2)
        named[theirs + "mlp.gate_proj.weight"], named[theirs + "mlp.up_proj.weight"] = gate, up
    return named


def from_llama_names(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The inverse of `to_llama_names`: a state dict for `Transformer`.

    Raises: KeyError naming a weight that is missing.
    """
    named = {ours: tensors[theirs] for ours, theirs in _WHOLE.items()}
    heads, head_size, width = config.num_heads, config.head_size, config.hidden_size
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        for own, other in _BLOCK.items():
            named[ours + own] = tensors[theirs + other]
        rows = [tensors[f"{theirs}self_attn.{letter}_proj.weight"] for letter in "qkv"]
        named[ours + "qkv.weight"] = torch.stack(rows).view(3, heads, head_size, width)
        columns = tensors[theirs + "self_attn.o_proj.weight"]
        named[ours + "output.weight"] = columns.reshape(width, heads, head_size)
        pair = (tensors[theirs + "mlp.gate_proj.weight"], tensors[theirs + "mlp.up_proj.weight"])
        named[ours + "gate_up.weight"] = torch.cat(pair)
    return named
