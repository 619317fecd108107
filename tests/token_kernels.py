"""How far extra passes by kernels are from plain operations: one JSON line a case.

`python tests/token_kernels.py cuda|cpu`; on a CPU under Triton's interpreter (TRITON_INTERPRET=1).
Each case reads a prompt and then tokens one by one with a static cache, three times with the same
weights: by kernels, by plain operations, and by plain operations in float64.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from transformers import StaticCache

from sgt_ds.inference.hf import modeling_sgt

D, HEADS, SIZE, PROMPT, TOKENS = 48, 20, 16, 37, 3
PASSES = 3


@dataclass(frozen=True)
class Case:
    """What differs between the cases."""

    dtype: torch.dtype = torch.float32
    attention: str = "sdpa"
    sequences: int = 1
    padding: int = 0
    """At the left of the first sequence."""
    heads: tuple[int, ...] = (0, 2)
    length: int = 45
    """Of the cache."""


CASES = [
    Case(attention="eager"),
    Case(sequences=2, padding=20),  # more than a block of slots
    Case(heads=(1, 5, 17, 19)),
    Case(attention="eager", length=2100),  # larger blocks
    Case(dtype=torch.bfloat16),
    Case(dtype=torch.bfloat16, attention="eager", sequences=2, padding=20),
]


def build(attention: str = "sdpa", heads: tuple[int, ...] = (0, 2)) -> Any:
    """A float32 model of three layers, two of which loop."""
    config = modeling_sgt.SgtConfig(
        vocab_size=97,
        hidden_size=D,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=SIZE,
        rms_norm_eps=0.01,  # as large as what it is added to
        attn_implementation=attention,
        loops={"1": {"depth": 2, "heads": list(heads)}, "2": {"depth": 1, "heads": [1]}},
    )
    torch.manual_seed(0)
    model = modeling_sgt.SgtForCausalLM(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.15)
        else:
            weight.data.uniform_(0.5, 1.5)
    return model


def read(case: Case, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, list[int]]:
    """Logits of the last prompt token and of each after it, and how full the cache layers are."""
    model = build(case.attention, case.heads).to(device, dtype)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 97, (case.sequences, PROMPT + TOKENS), generator=generator).to(device)
    seen = torch.ones_like(ids)
    seen[0, : case.padding] = 0
    positions = (seen.cumsum(1) - 1).clamp_min(0)
    cache = StaticCache(config=model.config, max_cache_len=case.length)
    logits = []
    with torch.inference_mode():
        for start, stop in [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, PROMPT + TOKENS))]:
            answer = model(
                ids[:, start:stop],
                attention_mask=seen[:, :stop],
                position_ids=positions[:, start:stop],
                logits_to_keep=1,
                **modeling_sgt._cache_as_known({"cache": cache}),
            )
            logits.append(answer.logits[:, -1].double())
    return torch.stack(logits), [int(layer.get_seq_length()) for layer in cache.layers]


def compared(case: Case, device: str) -> dict[str, Any]:
    """The case three times; differences relative to float64."""
    usual, calls = modeling_sgt.takes_token, 0

    def kernels(attention: Any, hidden: torch.Tensor, *others: Any) -> bool:
        nonlocal calls
        if device == "cpu":
            taken = hidden.shape[1] == 1
        else:  # as in a compiled step
            with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
                taken = usual(attention, hidden, *others)
        calls += taken
        return taken

    try:
        modeling_sgt.takes_token = kernels
        ours, ours_full = read(case, case.dtype, device)
        modeling_sgt.takes_token = lambda *_: False
        plain, plain_full = read(case, case.dtype, device)
        exact, _ = read(case, torch.float64, device)
    finally:
        modeling_sgt.takes_token = usual
    return {
        "case": str(case),
        "calls": calls,
        "kernels": ((ours - exact).norm() / exact.norm()).item(),
        "plain": ((plain - exact).norm() / exact.norm()).item(),
        "full": [ours_full, plain_full],
    }


def beyond_the_end(device: str) -> dict[str, Any]:
    """What a token for which a cache has no slot leaves of the cache."""
    model = build().to(device)
    layer, length = model.model.layers[1], 20
    cache = StaticCache(config=model.config, max_cache_len=length)
    cache.early_initialization(
        1, model.config.pass_heads(), SIZE, torch.float32, torch.device(device)
    )
    entries = cache.layers[3:5]
    for entry in entries:
        entry.keys.fill_(0.5)
        entry.values.fill_(0.25)
        entry.cumulative_length.fill_(length)
    turn = (torch.ones(1, 1, SIZE, device=device), torch.zeros(1, 1, SIZE, device=device))
    mask = torch.ones(1, 1, 1, length, dtype=torch.bool, device=device)
    hidden = torch.ones(1, 1, D, device=device)
    with torch.inference_mode():
        added = modeling_sgt.again_for_token(
            layer.self_attn, hidden, layer.loop, layer.input_layernorm, turn, mask, entries
        )
    kept = all((e.keys == 0.5).all() and (e.values == 0.25).all() for e in entries)
    return {"kept": kept, "finite": bool(added.isfinite().all())}


if __name__ == "__main__":
    for each in CASES:
        print(json.dumps(compared(each, sys.argv[1])), flush=True)
    print(json.dumps(beyond_the_end(sys.argv[1])), flush=True)
