"""Sparse Growing Transformer: a LLaMA decoder in which some layers re-apply some of their heads.

Self-contained: needs `torch` and `transformers` >= 5.23 (compiled on a GPU it uses Triton as well,
which comes with `torch` there), and travels with the weights. Loads
through `AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)`.

A looping layer of depth K computes, from its input H,

    H(0) = H + sum over all heads i of Attn_i(H)
    H(k) = H(k-1) + sum over the looping heads i of Attn_i(H(k-1)),   k = 1 … K
    output = H(K) + FFN(H(K))

where Attn includes the layer's own norm and rotary embedding. The extra passes have no weights of
their own: they read the looping heads' rows of W_q, W_k, W_v and columns of W_o. A loop of scope
`block` re-applies the whole layer K times instead. Each extra pass has a cache layer of its own,
numbered after those of the main passes, which holds the looping heads only.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.cache_utils import StaticLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    rotate_half,
)

try:
    import triton
    import triton.language as tl
except Exception:  # PyTorch for CPUs has none, and plain operations do the same work
    triton = None


class Loop(NamedTuple):
    """The extra passes of one layer, as the model runs them."""

    depth: int
    """Passes after the main one."""
    scope: str
    """What is re-applied: `attention` or `block`."""
    heads: tuple[int, ...]
    """The heads that the extra passes compute, ascending."""
    factors: tuple[tuple[float, ...], ...]
    """What each pass multiplies each computed head's output by; empty for 1."""


class SgtConfig(LlamaConfig):
    """A LLaMA configuration with `loops`.

    `loops` maps a layer's number (as text, from 0) to `{"depth": K, "heads": [ascending] or None
    for all, "scope": "attention" | "block"}`. A model exported while a loop was entering has
    `scale` as well: it maps each head that is computed (as text) to its K factors, one a pass.
    """

    model_type = "sgt"
    base_model_tp_plan = (
        None  # gathering heads out of weights that are sharded by head is not built
    )

    loops: dict[str, dict[str, Any]] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.loops = {str(layer): dict(loop) for layer, loop in (self.loops or {}).items()}
        if self.loops and self.num_key_value_heads != self.num_attention_heads:
            raise ValueError("loops need as many key-value heads as attention heads")
        for layer in self.loops:
            if not 0 <= int(layer) < self.num_hidden_layers:
                raise ValueError(f"loops: layer {layer} does not exist")
            self.loop_of(int(layer))

    def loop_of(self, layer: int) -> Loop | None:
        """The loop of one layer, or None. Raises: ValueError where `loops` describes none."""
        given = (self.loops or {}).get(str(layer))
        if given is None:
            return None
        depth, scope = given["depth"], given.get("scope", "attention")
        scale, heads = given.get("scale"), given.get("heads")
        if scale is not None:
            heads = sorted(int(head) for head in scale)
        elif heads is None or scope == "block":
            heads = list(range(self.num_attention_heads))
        if depth < 1 or scope not in ("attention", "block"):
            raise ValueError(f"loops: layer {layer} needs a depth and the scope attention or block")
        if not heads or heads != sorted({h for h in heads if 0 <= h < self.num_attention_heads}):
            raise ValueError(f"loops: layer {layer} needs heads that exist, in ascending order")
        factors: tuple[tuple[float, ...], ...] = ()
        if scale is not None:
            if any(len(column) != depth for column in scale.values()):
                raise ValueError(f"loops: layer {layer} needs {depth} factors a head")
            factors = tuple(zip(*(map(float, scale[str(head)]) for head in heads), strict=True))
        return Loop(depth, scope, tuple(heads), factors)

    def pass_heads(self) -> list[int]:
        """How many heads each cache layer holds: the main passes first, then the extra ones."""
        layers = self.__dict__["num_hidden_layers"]
        loops = [self.loop_of(layer) for layer in range(layers)]
        extra = [len(loop.heads) for loop in loops if loop for _ in range(loop.depth)]
        return [self.num_key_value_heads] * layers + extra

    def get_text_config(
        self, decoder: bool | None = None, encoder: bool | None = None
    ) -> LlamaConfig:
        """The configuration itself; for a decoder's cache, a view with every pass as a layer.

        Caches size themselves by `get_text_config(decoder=True).num_hidden_layers`.
        """
        if not decoder or encoder or not self.loops:
            return super().get_text_config(decoder=decoder, encoder=encoder)
        counted = object.__new__(_CountedConfig)
        counted.__dict__ = self.__dict__  # what is set on the view holds for the model
        return counted


class _CountedConfig(SgtConfig):
    """The same values; `num_hidden_layers` counts the extra passes too."""

    @property
    def num_hidden_layers(self) -> int:
        return len(self.pass_heads())


class SgtRMSNorm(nn.Module):
    """RMSNorm in at least float32, so that a float64 model keeps float64."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        precise = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        normed = F.rms_norm(precise, self.weight.shape, None, self.variance_epsilon)
        return self.weight * normed.to(hidden_states.dtype)


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in plain operations, softmax in at least float32."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    precise = torch.promote_types(scores.dtype, torch.float32)
    weights = F.softmax(scores, dim=-1, dtype=precise).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def _weight(projection: nn.Linear) -> torch.Tensor:
    """The weight, wherever it is: one that `device_map` keeps off the device comes when it is
    called for by the module's own hook, which an extra pass does not run through.
    """
    hook = getattr(projection, "_hf_hook", None)
    if hook is None or not projection.weight.is_meta:
        return projection.weight
    weight: torch.Tensor = hook.weights_map["weight"].to(hook.execution_device)
    return weight


class SgtAttention(LlamaAttention):
    """LLaMA's attention, over all heads or over a gathered few."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        cache_layer: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The main pass: all heads. Returns the output and, where known, the attention weights."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            projection(hidden_states).view(shape).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        mixed, weights = self._attend(
            query, key, value, attention_mask, cache, cache_layer, **kwargs
        )
        return self.o_proj(mixed), weights

    def rows(self, heads: tuple[int, ...]) -> torch.Tensor:
        """Rows of W_q, W_k, W_v of some heads: (3 × heads × head size, d).

        By slices with fixed bounds: no index tensor that would have to follow the weights to their
        device, and nothing that a compiled or captured graph could stumble over.
        """
        weights = [_weight(each) for each in (self.q_proj, self.k_proj, self.v_proj)]
        return torch.cat([weight[self._span(head)] for weight in weights for head in heads])

    def columns(self, heads: tuple[int, ...], factors: tuple[float, ...] = ()) -> torch.Tensor:
        """Columns of W_o of some heads, times a factor each: (d, heads × head size)."""
        weight = _weight(self.o_proj)
        columns = [weight[:, self._span(head)] for head in heads]
        if factors:
            columns = [column * factor for column, factor in zip(columns, factors, strict=True)]
        return torch.cat(columns, dim=1)

    def _span(self, head: int) -> slice:
        return slice(head * self.head_dim, (head + 1) * self.head_dim)

    def is_plain(self) -> bool:
        """Whether heads can be taken out of the projections: not of adapters or quantised ones."""
        projections = (self.q_proj, self.k_proj, self.v_proj, self.o_proj)
        return all(
            type(each) is nn.Linear and not hasattr(type(each.weight), "__tensor_flatten__")
            for each in projections
        )

    def again(
        self,
        hidden_states: torch.Tensor,
        heads: tuple[int, ...],
        factors: tuple[float, ...],
        weights: tuple[torch.Tensor, torch.Tensor] | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: Any,
        cache_layer: int,
        **kwargs: Any,
    ) -> torch.Tensor:
        """What an extra pass adds. `weights`: of `rows` and `columns`, or None to go through the
        whole projections, whatever they are.
        """
        sequences, positions = hidden_states.shape[:2]
        if weights is None:
            projected = self._through_projections(hidden_states, heads)
        else:
            projected = F.linear(hidden_states, weights[0])
        split = projected.view(sequences, positions, 3, -1, self.head_dim)
        projected = split.permute(2, 0, 3, 1, 4)
        turning, value = projected[:2], projected[2]
        cos, sin = (table.unsqueeze(1) for table in position_embeddings)
        # Queries and keys at once: a pass over few heads costs what its operations cost to start.
        query, key = (turning * cos + rotate_half(turning) * sin).unbind(0)
        mixed, _ = self._attend(query, key, value, attention_mask, cache, cache_layer, **kwargs)
        if weights is None:
            return self._through_output(mixed, heads, factors)
        return F.linear(mixed, weights[1])

    def _through_projections(
        self, hidden_states: torch.Tensor, heads: tuple[int, ...]
    ) -> torch.Tensor:
        whole = [each(hidden_states) for each in (self.q_proj, self.k_proj, self.v_proj)]
        return torch.cat([each[..., self._span(head)] for each in whole for head in heads], dim=-1)

    def _through_output(
        self, mixed: torch.Tensor, heads: tuple[int, ...], factors: tuple[float, ...]
    ) -> torch.Tensor:
        """The output projection, with nothing from the other heads."""
        parts = torch.split(mixed, self.head_dim, dim=-1)
        computed = dict(zip(heads, parts, strict=True))
        if factors:
            for head, factor in zip(heads, factors, strict=True):
                computed[head] = computed[head] * factor
        none = torch.zeros_like(computed[heads[0]])
        every = range(self.config.num_attention_heads)
        whole: torch.Tensor = self.o_proj(
            torch.cat([computed.get(head, none) for head in every], dim=-1)
        )
        return whole

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Any,
        cache_layer: int,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if cache is not None:
            key, value = cache.update(key, value, cache_layer)
        attention: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention
        )
        mixed, weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return mixed.reshape(*mixed.shape[:2], -1).contiguous(), weights


# An extra pass over one token is too little work for operations that each take a microsecond to
# start: in a compiled step on a GPU, with a static cache, it is the three kernels below.
_DEVICE = "cuda"
_MOST_HEADS, _MOST_SEQUENCES, _LONGEST = 4, 8, 4096
_SIZES = (16, 32, 64, 128)
# Rows or slots of a program, and its warps: the fastest of those tried on an H200 (d 1024, head
# size 64), where a pass takes 7 µs in a CUDA graph, 8.5 with a cache of 4,096.
_PROJECT_ROWS, _PROJECT_WARPS = 2, 4
_ATTEND_SLOTS, _ATTEND_WARPS, _ATTEND_BLOCKS = 16, 1, 128
_OUTPUT_ROWS, _OUTPUT_WARPS = 32, 4

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _project_token(  # type: ignore[no-untyped-def]
        hidden,  # (sequences, d)
        norm,  # (d,)
        w_q,  # (all heads x SIZE, d)
        w_k,
        w_v,
        cos,  # (sequences or 1, SIZE)
        sin,
        query,  # (sequences, HEADS, SIZE): gets the queries
        keys,  # (sequences, HEADS, length, SIZE): get the token's at its slot
        values,
        filled,  # slots of the cache in use: the token's is the next
        heads,  # their numbers, eight bits each
        d,
        length,
        turn_stride,
        eps,
        HEADS: tl.constexpr,
        SIZE: tl.constexpr,
        ROWS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        """Norm, projection and rotary embedding.

        A program computes, of the queries, keys or values of one head, ROWS of the first half and
        the same of the second, which the rotary embedding turns together.
        """
        program, sequence = tl.program_id(0), tl.program_id(1)
        HALF: tl.constexpr = SIZE // 2
        PARTS: tl.constexpr = HALF // ROWS
        index = program // PARTS % HEADS
        kind = program // (PARTS * HEADS)
        if kind == 0:
            weight = w_q
        elif kind == 1:
            weight = w_k
        else:
            weight = w_v
        upper = program % PARTS * ROWS + tl.arange(0, ROWS)
        lower = upper + HALF
        columns = tl.arange(0, WIDTH)
        inside = columns < d
        weight += ((heads >> (8 * index)) & 255) * SIZE * d + columns[None, :]
        upper_weight = tl.load(weight + upper[:, None] * d, inside[None, :], 0.0).to(tl.float32)
        lower_weight = tl.load(weight + lower[:, None] * d, inside[None, :], 0.0).to(tl.float32)
        scale = tl.load(norm + columns, inside, 0.0).to(tl.float32)
        slot = tl.load(filled)
        x = tl.load(hidden + sequence * d + columns, inside, 0.0).to(tl.float32)
        normed = (x * tl.rsqrt(tl.sum(x * x) / d + eps)).to(norm.dtype.element_ty).to(tl.float32)
        normed = (scale * normed).to(norm.dtype.element_ty).to(tl.float32)[None, :]
        first = tl.sum(upper_weight * normed, 1)
        second = tl.sum(lower_weight * normed, 1)
        if kind < 2:
            turn = sequence * turn_stride
            turned = first * tl.load(cos + turn + upper) - second * tl.load(sin + turn + upper)
            second = second * tl.load(cos + turn + lower) + first * tl.load(sin + turn + lower)
            first = turned
        row = sequence * HEADS + index
        if kind == 0:
            tl.store(query + row * SIZE + upper, first)
            tl.store(query + row * SIZE + lower, second)
        elif slot < length:
            entry = (row * length + slot) * SIZE
            if kind == 1:
                tl.store(keys + entry + upper, first)
                tl.store(keys + entry + lower, second)
            else:
                tl.store(values + entry + upper, first)
                tl.store(values + entry + lower, second)

    @triton.jit  # type: ignore[untyped-decorator]
    def _attend_token(  # type: ignore[no-untyped-def]
        query,
        keys,
        values,
        filled,
        mask,  # (sequences or 1, 1, 1, length): added, or True where it attends
        highest,  # (sequences, HEADS, blocks) float32: gets the highest score of each block of slots
        total,  # the same shape: gets the sum of exp(score - highest)
        mixed,  # (sequences, HEADS, blocks, SIZE) float32: gets the values, summed with that weight
        length,
        mask_stride,
        slot_stride,
        scaling,
        CHOOSES: tl.constexpr,
        HEADS: tl.constexpr,
        SIZE: tl.constexpr,
        SLOTS: tl.constexpr,
    ):
        """Attention over one block of SLOTS slots, for one head."""
        block, index, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        row = sequence * HEADS + index
        slots = block * SLOTS + tl.arange(0, SLOTS)
        columns = tl.arange(0, SIZE)
        known = slots < tl.minimum(tl.load(filled) + 1, length)
        entry = (row * length + slots)[:, None] * SIZE + columns[None, :]
        key = tl.load(keys + entry, known[:, None], 0.0).to(tl.float32)
        value = tl.load(values + entry, known[:, None], 0.0).to(tl.float32)
        masked = tl.load(mask + sequence * mask_stride + slots * slot_stride, known, 0)
        asked = tl.load(query + row * SIZE + columns).to(tl.float32) * scaling
        scores = tl.sum(key * asked[None, :], 1)
        if CHOOSES:
            known = known & (masked != 0)
        else:
            scores += masked.to(tl.float32)
        # Not infinite, so that a block in which nothing attends is no undefined one.
        scores = tl.maximum(tl.where(known, scores, -1.0e30), -1.0e30)
        top = tl.max(scores, 0)
        weights = tl.exp(scores - top)
        place = row * tl.num_programs(0) + block
        tl.store(highest + place, top)
        tl.store(total + place, tl.sum(weights, 0))
        tl.store(mixed + place * SIZE + columns, tl.sum(weights[:, None] * value, 0))

    @triton.jit  # type: ignore[untyped-decorator]
    def _output_token(  # type: ignore[no-untyped-def]
        hidden,
        highest,
        total,
        mixed,
        w_o,  # (d, all heads x SIZE)
        following,  # (sequences, d): gets `hidden` and what the pass adds
        filled,  # gets one more
        heads,
        d,
        wide,
        blocks,
        HEADS: tl.constexpr,
        SIZE: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCKS: tl.constexpr,
    ):
        """The blocks of each head put together, and ROWS rows of the output projection."""
        program, sequence = tl.program_id(0), tl.program_id(1)
        rows = program * ROWS + tl.arange(0, ROWS)
        inside = rows < d
        columns = tl.arange(0, SIZE)
        numbers = tl.arange(0, BLOCKS)
        known = numbers < blocks
        added = tl.zeros((ROWS,), tl.float32)
        for index in tl.static_range(HEADS):
            weight = w_o + ((heads >> (8 * index)) & 255) * SIZE + columns[None, :]
            weight = tl.load(weight + rows[:, None] * wide, inside[:, None], 0.0).to(tl.float32)
            place = (sequence * HEADS + index) * blocks + numbers
            top = tl.load(highest + place, known, -1.0e30)
            parts = tl.load(total + place, known, 0.0)
            values = tl.load(mixed + place[:, None] * SIZE + columns[None, :], known[:, None], 0.0)
            kept = tl.exp(top - tl.max(top, 0))
            head = tl.sum(kept[:, None] * values, 0) / tl.sum(kept * parts, 0)
            head = head.to(w_o.dtype.element_ty).to(tl.float32)
            added += tl.sum(weight * head[None, :], 1)
        added = added.to(following.dtype.element_ty).to(tl.float32)
        before = tl.load(hidden + sequence * d + rows, inside, 0.0).to(tl.float32)
        tl.store(following + sequence * d + rows, before + added, inside)
        if program == 0 and sequence == 0:
            tl.store(filled, tl.load(filled) + 1)


def takes_token(
    attention: SgtAttention,
    hidden_states: torch.Tensor,
    loop: Loop,
    norm: nn.Module,
    mask: torch.Tensor | None,
    cache: Any,
    layers: Sequence[Any],
) -> bool:
    """Whether `again_for_token` computes the extra passes; `layers` of the cache are theirs.

    In compiled steps only: kernels sum in another order than the library's products, as a
    compiler's do, while without one a cache is to change as few texts as it does in LLaMA.
    """
    if triton is None or not torch.compiler.is_compiling():
        return False
    # Within dynamo some versions say that all is exported.
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        return False
    sequences, positions = hidden_states.shape[:2]
    dtype, device, size = hidden_states.dtype, hidden_states.device, attention.head_dim
    if device.type != _DEVICE or positions > 1 or sequences > _MOST_SEQUENCES:
        return False
    if dtype not in (torch.bfloat16, torch.float16, torch.float32) or size not in _SIZES:
        return False
    if len(loop.heads) > _MOST_HEADS or max(loop.heads) > 255 or loop.factors:
        return False
    if torch.is_grad_enabled() or attention.training:
        return False
    if attention.config._attn_implementation not in ("eager", "sdpa") or mask is None:
        return False
    length = mask.shape[-1]
    if mask.dtype not in (torch.bool, dtype) or mask.shape[1:3] != (1, 1) or length > _LONGEST:
        return False
    if getattr(cache, "offloading", False) or len(layers) != loop.depth:
        return False
    if not all(type(layer) is StaticLayer and layer.is_initialized for layer in layers):
        return False
    entries = [entry for layer in layers for entry in (layer.keys, layer.values)]
    if any(entry.shape != (sequences, len(loop.heads), length, size) for entry in entries):
        return False
    if not attention.is_plain() or type(norm) is not SgtRMSNorm:
        return False
    if norm._forward_hooks or norm._forward_pre_hooks:
        return False
    read = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, norm]
    if not all(
        each.device == device and each.dtype == dtype and each.is_contiguous()
        for each in [*entries, *(module.weight for module in read)]
    ):
        return False
    # Triton starts kernels on the current device, whatever the tensors' is.
    return device.index == torch.cuda.current_device()


def again_for_token(
    attention: SgtAttention,
    hidden_states: torch.Tensor,
    loop: Loop,
    norm: SgtRMSNorm,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
    layers: Sequence[Any],
) -> torch.Tensor:
    """All extra passes over one token, (sequences, 1, d), each added to what it reads."""
    sequences, _, d = hidden_states.shape
    count, size, length = len(loop.heads), attention.head_dim, layers[0].keys.shape[2]
    packed = sum(head << (8 * index) for index, head in enumerate(loop.heads))
    cos, sin = (table.contiguous() for table in position_embeddings)
    slots = max(_ATTEND_SLOTS, triton.next_power_of_2(length) // _ATTEND_BLOCKS)
    blocks = triton.cdiv(length, slots)
    query = hidden_states.new_empty(sequences, count, size)
    highest = hidden_states.new_empty(sequences, count, blocks, dtype=torch.float32)
    total = torch.empty_like(highest)
    mixed = hidden_states.new_empty(sequences, count, blocks, size, dtype=torch.float32)
    for layer in layers:
        before = hidden_states.contiguous()
        hidden_states = torch.empty_like(before)
        _project_token[(3 * count * (size // 2 // _PROJECT_ROWS), sequences)](
            before,
            norm.weight,
            attention.q_proj.weight,
            attention.k_proj.weight,
            attention.v_proj.weight,
            cos,
            sin,
            query,
            layer.keys,
            layer.values,
            layer.cumulative_length,
            packed,
            d,
            length,
            cos.stride(0) if cos.shape[0] > 1 else 0,
            norm.variance_epsilon,
            HEADS=count,
            SIZE=size,
            ROWS=_PROJECT_ROWS,
            WIDTH=triton.next_power_of_2(d),
            num_warps=_PROJECT_WARPS,
        )
        _attend_token[(blocks, count, sequences)](
            query,
            layer.keys,
            layer.values,
            layer.cumulative_length,
            mask,
            highest,
            total,
            mixed,
            length,
            mask.stride(0) if mask.shape[0] > 1 else 0,
            mask.stride(3),
            attention.scaling,
            CHOOSES=mask.dtype == torch.bool,
            HEADS=count,
            SIZE=size,
            SLOTS=slots,
            num_warps=_ATTEND_WARPS,
        )
        _output_token[(triton.cdiv(d, _OUTPUT_ROWS), sequences)](
            before,
            highest,
            total,
            mixed,
            attention.o_proj.weight,
            hidden_states,
            layer.cumulative_length,
            packed,
            d,
            attention.o_proj.in_features,
            blocks,
            HEADS=count,
            SIZE=size,
            ROWS=_OUTPUT_ROWS,
            BLOCKS=triton.next_power_of_2(blocks),
            num_warps=_OUTPUT_WARPS,
        )
    return hidden_states


class SgtDecoderLayer(LlamaDecoderLayer):
    """One layer and its loop. `first_extra`: cache layer of its first extra pass."""

    def __init__(self, config: SgtConfig, layer_idx: int, first_extra: int) -> None:
        super(LlamaDecoderLayer, self).__init__()  # the parts below replace LLaMA's
        self.hidden_size = config.hidden_size
        self.layer_idx, self.first_extra = layer_idx, first_extra
        self.loop = config.loop_of(layer_idx)
        self.self_attn = SgtAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = SgtRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = SgtRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`cache` and `past_key_values` are the new and the old name of one argument."""
        shared = {
            "position_embeddings": position_embeddings,
            "attention_mask": attention_mask,
            "cache": past_key_values if cache is None else cache,
            **kwargs,
        }
        loop, attention = self.loop, self.self_attn
        normed = self.input_layernorm(hidden_states)
        added, _ = attention(normed, cache_layer=self.layer_idx, **shared)
        hidden_states = hidden_states + added
        if loop is not None and loop.scope == "attention":
            hidden_states = self._attend_again(hidden_states, loop, **shared)
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        if loop is not None and loop.scope == "block":
            for index in range(loop.depth):
                normed = self.input_layernorm(hidden_states)
                # `forward`, not a call: recorders of attention maps count one a layer.
                added, _ = attention.forward(normed, cache_layer=self.first_extra + index, **shared)
                hidden_states = hidden_states + added
                normed = self.post_attention_layernorm(hidden_states)
                hidden_states = hidden_states + self.mlp(normed)
        return hidden_states

    def _attend_again(
        self,
        hidden_states: torch.Tensor,
        loop: Loop,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        attention, norm = self.self_attn, self.input_layernorm
        layers = getattr(cache, "layers", ())[self.first_extra : self.first_extra + loop.depth]
        if takes_token(attention, hidden_states, loop, norm, attention_mask, cache, layers):
            assert attention_mask is not None
            return again_for_token(
                attention, hidden_states, loop, norm, position_embeddings, attention_mask, layers
            )
        weights = None
        if attention.is_plain():
            weights = attention.rows(loop.heads), attention.columns(loop.heads)
        for index in range(loop.depth):
            factors = loop.factors[index] if loop.factors else ()
            if weights is not None and factors:
                weights = weights[0], attention.columns(loop.heads, factors)
            hidden_states = hidden_states + attention.again(
                norm(hidden_states),
                loop.heads,
                factors,
                weights,
                position_embeddings,
                attention_mask,
                cache,
                self.first_extra + index,
                **kwargs,
            )
        return hidden_states


# transformers 5.24 renamed `past_key_values` to `cache`, and takes the old name with a warning.
_KNOWS_CACHE = "cache" in inspect.signature(LlamaModel.forward).parameters


def _cache_as_known(keywords: dict[str, Any]) -> dict[str, Any]:
    """Keywords in which a `cache` has the name that this version of `transformers` gives it."""
    if not _KNOWS_CACHE and "cache" in keywords:
        keywords["past_key_values"] = keywords.pop("cache")
    return keywords


class SgtModel(LlamaModel):
    """LLaMA's decoder with `SgtDecoderLayer`s."""

    config_class = SgtConfig
    config: SgtConfig
    _no_split_modules = ["SgtDecoderLayer"]
    _can_record_outputs = {"hidden_states": SgtDecoderLayer, "attentions": SgtAttention}

    def __init__(self, config: SgtConfig) -> None:
        super(LlamaModel, self).__init__(config)  # the parts below replace LLaMA's
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        layers, next_cache_layer = [], config.num_hidden_layers
        for index in range(config.num_hidden_layers):
            layers.append(SgtDecoderLayer(config, index, next_cache_layer))
            loop = layers[-1].loop
            next_cache_layer += 0 if loop is None else loop.depth
        self.layers = nn.ModuleList(layers)
        self.norm = SgtRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @functools.wraps(LlamaModel.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As `LlamaModel`; the cache under either name."""
        return super().forward(*args, **_cache_as_known(kwargs))


class SgtForCausalLM(LlamaForCausalLM):
    """LLaMA's language model over `SgtModel`."""

    config_class = SgtConfig
    config: SgtConfig
    _no_split_modules = ["SgtDecoderLayer"]
    _tp_plan: dict[str, str] = {}

    def __init__(self, config: SgtConfig) -> None:
        super(LlamaForCausalLM, self).__init__(config)  # the parts below replace LLaMA's
        self.model = SgtModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As `LlamaForCausalLM`; the cache under either name."""
        return super().forward(*args, **_cache_as_known(kwargs))

    @property
    def init_continuous_batching(self) -> Callable[..., Any]:
        """Absent where a layer loops: a paged cache has one layer for each of the model's, of the
        same number of heads. Servers ask whether it is there, and answer one by one otherwise.
        """
        if self.config.loops:
            raise AttributeError("continuous batching has no cache for extra passes")
        batching: Callable[..., Any] = super().init_continuous_batching
        return batching

    def _get_static_cache_init_shape(self) -> tuple[list[int], int] | None:
        """Heads of each cache layer and the head size, for caches that are made ahead of time."""
        usual = super()._get_static_cache_init_shape()
        return usual and (self.config.pass_heads(), self.config.head_dim)


SgtConfig.register_for_auto_class()
SgtModel.register_for_auto_class("AutoModel")
SgtForCausalLM.register_for_auto_class("AutoModelForCausalLM")
