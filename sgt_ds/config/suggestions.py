"""Suggestions for an unknown key or name. Reads no file and raises nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from sgt_ds.config.run import RunConfig
from sgt_ds.config.sections import fields_at

# Usual names of other programs -> our key of the same section.
OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    "model": {
        **dict.fromkeys(("layers", "n_layers", "n_layer", "num_hidden_layers"), "num_layers"),
        **dict.fromkeys(("heads", "n_heads", "n_head", "num_attention_heads"), "num_heads"),
        **dict.fromkeys(("dim", "width", "d_model", "n_embd", "hidden"), "hidden_size"),
        **dict.fromkeys(("d_ff", "ffn_size", "ffn_hidden_size", "ffn_dim"), "intermediate_size"),
        **dict.fromkeys(("vocab", "n_vocab", "vocabulary", "vocabulary_size"), "vocab_size"),
    },
    "data": {
        **dict.fromkeys(("seq_len", "seq_length", "max_length", "block_size"), "sequence_length"),
        **dict.fromkeys(("val", "valid", "eval"), "validation"),
    },
    "training": {
        **dict.fromkeys(("max_steps", "num_steps", "iterations", "updates"), "steps"),
        **dict.fromkeys(("batch_size", "train_batch_size"), "global_batch_size"),
        "float8": "fp8",
    },
    "optimizer": {
        "learning_rate": "lr",
        "warmup": "warmup_steps",
        **dict.fromkeys(("grad_clip", "max_grad_norm", "gradient_clipping"), "clip"),
    },
    "checkpoint": dict.fromkeys(("interval", "save_every", "save_interval", "frequency"), "every"),
    "evaluation": dict.fromkeys(("interval", "eval_every", "frequency"), "every"),
}
# What the DeepSpeed file says and no key here -> how it says it.
IN_DEEPSPEED: Mapping[str, str] = {
    **dict.fromkeys(
        ("precision", "mixed_precision", "dtype", "bf16"), "bf16: {enabled: true} (false: float32)"
    ),
    **dict.fromkeys(("zero", "zero_stage", "zero_optimization"), "zero_optimization: {stage: 2}"),
}


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """The nearest of the known names, as the end of a message; '' where none is near.

    Capitals count for nothing.
    """
    spelt = {each.lower(): each for each in known}
    matches = difflib.get_close_matches(name.lower(), spelt, n=1, cutoff=cutoff)
    return f"; did you mean '{spelt[matches[0]]}'?" if matches else ""


def hint(key: str, parents: Sequence[str]) -> str:
    """A near key beside the unknown one, or the same key of another section, or all known ones."""
    siblings = fields_at(parents)
    usual = OTHER_NAMES.get(".".join(parents), {}).get(key)
    if usual is not None:
        return f"; did you mean '{usual}'?"
    if key in IN_DEEPSPEED:
        return f"; that is set in the DeepSpeed file named by `deepspeed`: {IN_DEEPSPEED[key]}"
    near = nearest(key, siblings, cutoff=0.7)
    if near:
        return near
    if key in RunConfig.model_fields:
        return f"; did you mean '{key}' at the top level, not in a section?"
    for section in RunConfig.model_fields:
        if key in fields_at([section]):
            return f"; did you mean '{section}.{key}'?"
    return nearest(key, siblings) or f"; known: {', '.join(siblings)}"
