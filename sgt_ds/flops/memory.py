"""Peak memory of one rank. An estimate from shapes, ZeRO stage and what is kept.

Two moments are compared, both with all activations held: the loss, with its logits, and the first
block that is run backwards, with its working set and ZeRO's gradient buffers. The counts follow the
model's own code and DeepSpeed's ZeRO optimizers; both were held against a GPU. See docs/flops.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from sgt_ds.config import ModelConfig
from sgt_ds.flops.accountant import parameter_count
from sgt_ds.growth import Passes, is_narrow

ZeroStage = Literal[0, 1, 2]

LOGITS_AT_A_TIME = 1 << 28
"""Above so many the loss is computed in chunks of so many logits: `sgt_ds.model.loss`."""

DEEPSPEED_BUCKET = 500_000_000
"""`reduce_bucket_size` where a DeepSpeed file leaves it out, in elements."""


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
    fp8: bool = False
    """Products in float8: less is kept for them, which is not counted."""
    reduce_bucket_size: int = 200_000_000
    """Elements of one gradient bucket of ZeRO-2; by default as in ds_configs/zero2_bf16.json."""
    overlap_comm: bool = True
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
    """Peak memory of one rank in training: the parts as they are at the peak.

    `passes`: what the layers run in the different parts of the run; the most demanding counts.
    """
    moments = (moment for own in passes for moment in _moments(model, sequence_length, layout, own))
    return max(moments, key=lambda memory: memory.total)


def _moments(
    model: ModelConfig, sequence_length: int, layout: Layout, passes: Mapping[int, Passes]
) -> tuple[Memory, Memory]:
    """Memory at the loss, and where the first block is run backwards."""
    width, vocabulary = model.hidden_size, model.padded_vocab_size
    size = 2 if layout.precision == "bf16" else 4
    tokens = layout.micro_batch_size * sequence_length
    # Padding rows of both embeddings are parameters like any other here.
    parameters = parameter_count(model) + 2 * model.padding_rows * width
    optimizer, accumulated, reduced = _training_state(parameters, size, layout)
    held, working = _activations(model, size, layout, passes)
    chunk = max(1, LOGITS_AT_A_TIME // vocabulary)
    if tokens <= chunk:
        # Compiled, the logits turn into their gradients in place; eager, the float32
        # log-probabilities, their gradient and the logits' gradient stand side by side.
        logits = (size if layout.compiled else 12) * vocabulary * tokens
        gradients_at_loss, copies = reduced, 1
    else:
        # One chunk of logits with their gradients, and the output matrix's gradient in float32 and
        # what a chunk adds (in bf16 on CUDA the product itself adds it, and this is a bit too much).
        # All of it in the forward pass, before ZeRO has its buffers.
        logits = (2 * size if layout.compiled else 20) * vocabulary * chunk
        logits += (4 + size) * vocabulary * width
        gradients_at_loss, copies = accumulated, 2
    # What the loss leaves behind: gradients of the last hidden state and of the output matrix.
    left = size * width * (tokens + copies * vocabulary)
    weights, kept = parameters * size, held * tokens
    return (
        Memory(weights, gradients_at_loss, optimizer, kept, logits),
        Memory(weights, reduced, optimizer, kept + working * tokens, left),
    )


def _training_state(parameters: int, size: int, layout: Layout) -> tuple[int, int, int]:
    """Bytes of the optimizer's state, and of gradients: between passes, and in a backward one."""
    share = -(-parameters // layout.world_size)
    if layout.zero_stage == 0:
        # Plain data parallelism: in fp32 the weights themselves are what Adam updates.
        gradients = parameters * size
        return parameters * (8 if size == 4 else 12), gradients, gradients
    # Float32 master weights and two moments, each rank its share.
    optimizer = 12 * share
    buckets = (2 if layout.overlap_comm else 1) * layout.reduce_bucket_size * size
    if layout.zero_stage == 1 and size == 2:
        # A full float32 sum, to which the gradients of a backward pass are added at its end.
        return optimizer, 4 * parameters, 6 * parameters
    # In fp32 ZeRO reduces into a copy of the share before adding it up.
    copy = 4 * share if size == 4 else 0
    accumulated = 4 * (parameters if layout.zero_stage == 1 else share)
    return optimizer, accumulated, accumulated + copy + buckets


def _activations(
    model: ModelConfig, size: int, layout: Layout, passes: Mapping[int, Passes]
) -> tuple[int, int]:
    """Bytes of one token: held after the forward pass, and more while a block runs backwards."""
    width = model.hidden_size
    blocks = [_block(model, size, layout.compiled, passes.get(n)) for n in range(model.num_layers)]
    last_norm = _norm(width, size, layout.compiled)
    # Gradients of both halves of the SwiGLU.
    working = 2 * model.intermediate_size * size
    if layout.activation_checkpointing:
        return model.num_layers * width * size + last_norm, working + max(blocks)
    return sum(blocks) + last_norm, working


def _block(model: ModelConfig, size: int, compiled: bool, own: Passes | None) -> int:
    """Bytes that one block keeps of one token for its backward pass, with its loops."""
    # SwiGLU keeps its two halves and their product; eager, the activated gate as well.
    feed_forward = (3 if compiled else 4) * model.intermediate_size * size
    feed_forward += _norm(model.hidden_size, size, compiled)
    kept = _attention(model, size, compiled, model.num_heads) + feed_forward
    if own is None:
        return kept
    heads = own.head_count(model.num_heads)
    scaled = own.scale is not None
    if own.scope == "attention" and is_narrow(own.depth, heads, model.num_heads, scaled=scaled):
        return kept + _narrow_loop(model, size, compiled, own.depth, heads)
    again = _attention(model, size, compiled, heads)
    if own.scope == "block":
        again += feed_forward
    return kept + own.depth * again


def _narrow_loop(model: ModelConfig, size: int, compiled: bool, depth: int, heads: int) -> int:
    """Bytes that passes in the heads' own space keep of one token."""
    heads_width = heads * model.head_size
    read = 4 * heads_width  # of the stream: queries, keys, values, and what the heads' columns see
    # The residual stream and what all heads give it; its square, a pass, in float32.
    kept = size * (model.hidden_size + heads_width) + depth * (_mixing(model, size, heads) + 4)
    further = depth - 1
    if compiled:
        # What is read of the stream, once; its change and the heads' outputs, a further pass.
        return kept + size * (read + further * (read + heads_width))
    # Queries, keys and values in float32, in each pass (and as they were, where that is float32
    # too); what the heads' columns see, a further pass.
    projected = 3 * heads_width if size == 2 else 4 * heads_width
    return kept + 4 * (depth * projected + further * heads_width)


def _attention(model: ModelConfig, size: int, compiled: bool, heads: int) -> int:
    """Bytes that attention over so many heads keeps of one token, its norm included."""
    return _mixing(model, size, heads) + _norm(model.hidden_size, size, compiled)


def _mixing(model: ModelConfig, size: int, heads: int) -> int:
    """Bytes that attention over so many heads keeps of one token, between its projections."""
    # Projected queries, keys and values, rotated queries and keys, the output.
    return 6 * size * heads * model.head_size + 4 * heads  # and the sums of its softmax


def _norm(width: int, size: int, compiled: bool) -> int:
    """Bytes that an RMSNorm keeps of one token: its input, its output, the root mean square."""
    # Eager, the input is kept as the float32 copy that the norm is computed in.
    return width * ((size if compiled else 4) + size) + 4
