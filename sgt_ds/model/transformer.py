"""The decoder: parameters by name, and a forward pass through functional blocks.

Knows no schedule: what loops is an input of the pass. Holds no state but its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sgt_ds.config import ModelConfig
from sgt_ds.model.block import BlockWeights, block
from sgt_ds.model.documents import documents_of
from sgt_ds.model.loops import LoopInputs
from sgt_ds.model.loss import (
    Function,
    Prepare,
    as_it_is,
    chunked_next_token_loss,
    chunks_for,
    logits_of,
    next_token_loss,
)
from sgt_ds.model.norm import rms_norm
from sgt_ds.model.rope import RotaryTables

# Graphs that one function may have. A run needs a handful of kinds (depths, head counts, with and
# without factors, measured or not, with and without gradients); dynamo's own 8 would fall back to
# eager without a word in the middle of a run.
MAX_GRAPHS = 128


class Output(NamedTuple):
    """What a forward pass gives."""

    loss: Tensor | None
    """Mean next-token loss in nats, scalar, float32 (float64 weights: float64)."""
    logits: Tensor | None
    """(sequences, positions, padded vocabulary), only where no targets were given."""
    entropy: Tensor | None
    """float64 (layers, heads, 3), only where measured: sum, sum of squares and count over the
    sequences of this micro-batch, of the last row's normalised entropy."""


class Weight(nn.Module):
    """One named parameter."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*shape))


class Block(nn.Module):
    """Parameters of one block; `block` computes with them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.attention_norm = Weight(width)
        self.qkv = Weight(3, config.num_heads, config.head_size, width)
        self.output = Weight(width, config.num_heads, config.head_size)
        self.mlp_norm = Weight(width)
        self.gate_up = Weight(2 * inner, width)
        self.down = Weight(width, inner)

    def weights(self) -> BlockWeights:
        """The parameters as `block` takes them."""
        return BlockWeights(
            self.attention_norm.weight,
            self.qkv.weight,
            self.output.weight,
            self.mlp_norm.weight,
            self.gate_up.weight,
            self.down.weight,
        )


class Transformer(nn.Module):
    """LLaMA-style decoder whose layers can loop.

    `seed`: of the initial weights, which depend on it and on the shape alone.
    `compile_blocks`: compile each kind of block, and the loss, with torch.compile; may be changed
    between two passes. Blocks that are told where documents start are compiled on CUDA only.
    `activation_checkpointing`: recompute each block in the backward pass.
    `fp8`: the blocks' products with weights in float8; may be changed between two passes.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int = 0,
        compile_blocks: bool = False,
        activation_checkpointing: bool = False,
        fp8: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.compile_blocks = compile_blocks
        self.activation_checkpointing = activation_checkpointing
        self.fp8 = fp8
        self.embedding = Weight(config.padded_vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = Weight(config.hidden_size)
        self.lm_head = Weight(config.padded_vocab_size, config.hidden_size)
        self._rope = RotaryTables(config.head_size, config.rope_theta)
        self._initialise(seed)

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor | None = None,
        *,
        loops: Mapping[int, LoopInputs] | None = None,
        measure: bool = False,
        document_starts: Tensor | None = None,
    ) -> Output:
        """Run the model on a micro-batch.

        `input_ids`, `targets`: int64 (sequences, positions). `loops`: by layer, of `loop_inputs`;
        a layer that is not named does not loop. `measure`: give the entropy sums too.
        `document_starts`: int64 (sequences, positions), for each position the one at which its
        document starts in this sequence. Attention then stays within a document, in loops as well,
        and positions count from its start, as if each document had been passed alone. Targets stay
        as they are: a document's last position predicts the next one's first token, knowing only
        its own document. The entropy is that of the last position over its own document.
        """
        cos, sin = self._rope.at(input_ids.shape[1], input_ids.device)
        documents = None if document_starts is None else documents_of(document_starts)
        if documents is not None:
            cos, sin = cos[documents.positions], sin[documents.positions]
        x = F.embedding(input_ids, self.embedding.weight)
        eps, loops = self.config.rms_norm_eps, loops or {}
        # Document lengths as plain numbers (not CUDA) would be a graph of their own each time.
        compiles = self.compile_blocks and (documents is None or documents.lengths is None)
        run_block = (_compiled if compiles else as_it_is)(block)
        entropies: list[Tensor] = []
        for layer, module in enumerate(self.blocks):
            weights = cast(Block, module).weights()
            loop = loops.get(layer)
            arguments = (x, weights, cos, sin, eps, loop, measure, documents, self.fp8)
            if self.activation_checkpointing and torch.is_grad_enabled():
                # There is no dropout, so no random state to bring back; the entropies are those
                # of the first run, what the second computes is dropped.
                x, sums = checkpoint(
                    run_block, *arguments, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x, sums = run_block(*arguments)
            if sums is not None:
                entropies.append(sums)
        entropy = torch.stack(entropies) if measure else None
        if targets is None:
            logits = logits_of(x, self.norm.weight, self.lm_head.weight, eps)
            return Output(None, logits, entropy)
        return Output(self._loss_of(x, targets), None, entropy)

    def _loss_of(self, x: Tensor, targets: Tensor) -> Tensor:
        prepare: Prepare = _compiled if self.compile_blocks else as_it_is
        norm, head, eps = self.norm.weight, self.lm_head.weight, self.config.rms_norm_eps
        chunks = chunks_for(targets.numel(), self.config.padded_vocab_size)
        if chunks > 1:
            normed = prepare(rms_norm)(x, norm, eps)
            return chunked_next_token_loss(normed, head, targets, chunks, prepare)
        return prepare(next_token_loss)(x, norm, head, targets, eps)

    def _initialise(self, seed: int) -> None:
        """Matrices from one seeded CPU generator, in the order of definition; norms 1."""
        generator = torch.Generator().manual_seed(seed)
        std = self.config.init_std
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.trunc_normal_(parameter, 0.0, std, -3 * std, 3 * std, generator=generator)


@cache
def _compiled(function: Function) -> Function:
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_GRAPHS)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 4 * MAX_GRAPHS)
    return cast(Function, torch.compile(function, dynamic=False))
