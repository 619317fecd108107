"""The model: a LLaMA-style decoder with attention loops, its loss, the entropy it is grown by.

Functional blocks, so that growth changes inputs and never modules. Imports `config` and `growth`'s
state and entry.
"""

from sgt_ds.model.entropy import entropy_of_weights, entropy_sums, last_row_entropy
from sgt_ds.model.linear import float8_fault
from sgt_ds.model.loops import LoopInputs, loop_inputs
from sgt_ds.model.naming import (
    VOCABULARY_TENSORS,
    from_llama_names,
    llama_shape,
    to_llama_names,
)
from sgt_ds.model.transformer import Output, Transformer

__all__ = [
    "VOCABULARY_TENSORS",
    "LoopInputs",
    "Output",
    "Transformer",
    "entropy_of_weights",
    "entropy_sums",
    "float8_fault",
    "from_llama_names",
    "last_row_entropy",
    "llama_shape",
    "loop_inputs",
    "to_llama_names",
]
