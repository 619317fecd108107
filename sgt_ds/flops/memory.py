"""How much memory one rank needs at its peak. An estimate: knows shapes, ZeRO and what is kept.

The peak is taken at the start of the backward pass, when all activations are held. The counts of
activations follow the model's own code and were fitted to what a GPU allocated for it; the counts
of parameters, gradients and optimizer follow DeepSpeed's ZeRO optimizers. See docs/flops.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from sgt_ds.config import ModelConfig
from sgt_ds.flops.accountant import parameter_count
from sgt_ds.growth import Passes

ZeroStage = Literal[0, 1, 2]

DEFAULT_BUCKET = 500_000_000
"""DeepSpeed's `reduce_bucket_size`, in elements."""


@dataclass(frozen=True)
class Layout:
    """How the training is spread and executed, as far as memory depends on it."""

    world_size: int = 8
    """Ranks, over which ZeRO splits."""
    micro_batch_size: int = 8
    """Sequences of one forward pass on one rank."""
    zero_stage: ZeroStage = 2
    """What ZeRO splits: 1 the optimizer, 2 the gradients as well."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Of weights and activations; the optimizer is float32 throughout."""
    compiled: bool = True
    """Blocks and loss compiled: neighbouring element-wise work keeps no intermediate."""
    activation_checkpointing: bool = False
    """Only each block's input is kept."""
    reduce_bucket_size: int = DEFAULT_BUCKET
    """Elements of one gradient bucket of ZeRO-2."""
    overlap_comm: bool = False
    """Two buckets instead of one."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Sum of the parts. Without the CUDA context and the allocator's fragments."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits

    def as_json(self) -> dict[str, int]:
        """Plain values for JSON."""
        return {**asdict(self), "total": self.total}


def memory_per_rank(
    model: ModelConfig,
    sequence_length: int,
    layout: Layout,
    passes: Iterable[Mapping[int, Passes]] = ({},),
) -> Memory:
    """Peak memory of one rank in training.

    `passes`: what the layers run in the different parts of the run; the most demanding counts.
    """
    size = 2 if layout.precision == "bf16" else 4
    # Padding rows of both embeddings are parameters like any other here.
    padding = 2 * (model.padded_vocab_size - model.vocab_size) * model.hidden_size
    parameters = parameter_count(model) + padding
    gradients, optimizer = _training_state(parameters, size, layout)
    tokens = layout.micro_batch_size * sequence_length
    # Compiled, the loss turns its logits into their gradients in place; eager, the float32
    # log-probabilities, their gradient and the gradient of the logits stand side by side.
    logits = (size if layout.compiled else 12) * model.padded_vocab_size
    activations = max(_activations(model, size, layout, own, logits) for own in passes)
    return Memory(
        parameters=parameters * size,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations * tokens,
        logits=logits * tokens,
    )


def _training_state(parameters: int, size: int, layout: Layout) -> tuple[int, int]:
    """Bytes of gradients and of optimizer state."""
    share = -(-parameters // layout.world_size)
    if layout.zero_stage == 0:
        # Plain data parallelism: in fp32 the weights themselves are what Adam updates.
        return parameters * size, parameters * (8 if size == 4 else 12)
    # Float32 master weights and two moments, each rank its share.
    optimizer = 12 * share
    if layout.zero_stage == 1:
        return 4 * parameters, optimizer
    buckets = 2 if layout.overlap_comm else 1
    return 4 * share + buckets * layout.reduce_bucket_size * size, optimizer


def _activations(
    model: ModelConfig, size: int, layout: Layout, passes: Mapping[int, Passes], logits: int
) -> int:
    """Bytes of one token at the peak, beside its logits."""
    width = model.hidden_size
    blocks = [_block(model, size, layout.compiled, passes.get(n)) for n in range(model.num_layers)]
    last_norm = _norm(width, size, layout.compiled)
    # Gradient of both halves of the SwiGLU while one block is run backwards.
    working = 2 * model.intermediate_size * size
    if layout.activation_checkpointing:
        held = model.num_layers * width * size + last_norm
        working += max(blocks)
    else:
        held = sum(blocks) + last_norm
    # The logits are gone by the time at which a block is run backwards.
    return held + max(0, working - logits)


def _block(model: ModelConfig, size: int, compiled: bool, own: Passes | None) -> int:
    """Bytes that one block keeps of one token for its backward pass, with its loops."""
    # SwiGLU keeps its two halves and their product; eager, the activated gate as well.
    feed_forward = (3 if compiled else 4) * model.intermediate_size * size
    feed_forward += _norm(model.hidden_size, size, compiled)
    kept = _attention(model, size, compiled, model.num_heads) + feed_forward
    if own is None:
        return kept
    again = _attention(model, size, compiled, own.head_count(model.num_heads))
    if own.scope == "block":
        again += feed_forward
    return kept + own.depth * again


def _attention(model: ModelConfig, size: int, compiled: bool, heads: int) -> int:
    """Bytes that attention over so many heads keeps of one token, its norm included."""
    # Projected queries, keys and values, rotated queries and keys, the output; the flash kernel
    # of the 2-byte types gives the output by head, so that joining the heads makes a copy.
    rows = 7 if size == 2 else 6
    log_sums = 4 * heads
    inner = rows * size * heads * model.head_size + log_sums
    return inner + _norm(model.hidden_size, size, compiled)


def _norm(width: int, size: int, compiled: bool) -> int:
    """Bytes that an RMSNorm keeps of one token: its input, its output, the root mean square."""
    # Eager, the input is kept as the float32 copy that the norm is computed in.
    return width * ((size if compiled else 4) + size) + 4
