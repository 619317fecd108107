"""The accountant: training FLOPs of a shape and its loops, in exact integers.

Knows shapes and passes; no model, no clock, no schedule. Convention of the paper's FLOPs column:
attention counted non-causal, the embedding's rows free in the forward pass and counted in the
backward one, RMSNorm weights counted as parameters, backward = twice forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgt_ds.config import ModelConfig
from sgt_ds.growth import Passes


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the model: both embeddings, all matrices, all RMSNorm weights.

    Counts the tokenizer's vocabulary, not the rows that padding adds to the embeddings.
    """
    width = model.hidden_size
    block = 4 * width * width + 3 * width * model.intermediate_size + 2 * width
    return 2 * model.vocab_size * width + model.num_layers * block + width


def vanilla_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """Training FLOPs of one token without any loop: forward and backward.

    `sequence_length`: positions of one sequence (N); every token is counted as attending to all N.
    """
    parameters = parameter_count(model)
    attention = model.num_layers * sequence_length * model.hidden_size
    forward = 2 * (parameters - model.vocab_size * model.hidden_size) + 4 * attention
    backward = 4 * parameters + 8 * attention
    return forward + backward


def loop_flops_per_token(
    model: ModelConfig, sequence_length: int, passes: Mapping[int, Passes]
) -> int:
    """Training FLOPs that the loops add for one token: forward and backward of every pass.

    `passes`: layer -> what it runs in this update. A head that is computed counts in full,
    whatever factor scales its output.
    """
    width, size = model.hidden_size, model.head_size
    head = 24 * width * size + 12 * sequence_length * size
    block = (
        6 * (4 * width * width + 3 * width * model.intermediate_size) + 12 * sequence_length * width
    )
    return sum(
        own.depth * (block if own.scope == "block" else own.head_count(model.num_heads) * head)
        for own in passes.values()
    )


class FlopsCounter:
    """FLOPs of a run so far: what it spent, and what it would have spent without loops."""

    def __init__(self, model: ModelConfig, sequence_length: int) -> None:
        self.model, self.sequence_length = model, sequence_length
        self.vanilla_per_token = vanilla_flops_per_token(model, sequence_length)
        self.per_token = self.vanilla_per_token
        """FLOPs of one token in the update that was added last."""
        self.total = 0
        """FLOPs of all tokens added so far."""
        self.vanilla = 0
        """What the same tokens would have cost without loops."""

    def add(self, tokens: int, passes: Mapping[int, Passes]) -> None:
        """Count the tokens of one update, or of several that ran the same passes."""
        self.per_token = self.vanilla_per_token + loop_flops_per_token(
            self.model, self.sequence_length, passes
        )
        self.total += tokens * self.per_token
        self.vanilla += tokens * self.vanilla_per_token

    @property
    def overhead_ratio(self) -> float:
        """Cumulative overhead: (total − vanilla) / vanilla; 0 before the first token."""
        return (self.total - self.vanilla) / self.vanilla if self.vanilla else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint; exact in JSON."""
        return {"total": self.total, "vanilla": self.vanilla, "per_token": self.per_token}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave. Raises: KeyError, TypeError, ValueError."""
        total, vanilla, per_token = (int(values[key]) for key in ("total", "vanilla", "per_token"))
        self.total, self.vanilla, self.per_token = total, vanilla, per_token
