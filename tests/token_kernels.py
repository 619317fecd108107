"""How far an extra pass by kernels is from plain operations: one JSON line a case.

`python tests/token_kernels.py cuda|cpu`; on a CPU under Triton's interpreter (TRITON_INTERPRET=1).
Each case reads a prompt and then tokens one by one with a static cache, three times with the same
weights: by kernels, by plain operations, and by plain operations in float64.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import StaticCache

from sgt_ds.inference.hf import modeling_sgt

D, HEADS, SIZE, PROMPT, TOKENS, LENGTH = 48, 3, 16, 37, 3, 45
# dtype, attention, sequences, padding at the left of the first: more than a block of slots.
CASES = [
    (torch.float32, "eager", 1, 0),
    (torch.float32, "sdpa", 2, 20),
    (torch.bfloat16, "sdpa", 1, 0),
    (torch.bfloat16, "eager", 2, 20),
]


def build(attention: str) -> Any:
    """A float64 model of three layers, two of which loop."""
    config = modeling_sgt.SgtConfig(
        vocab_size=97,
        hidden_size=D,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=SIZE,
        attn_implementation=attention,
        loops={"1": {"depth": 2, "heads": [0, 2]}, "2": {"depth": 1, "heads": [1]}},
    )
    torch.manual_seed(0)
    model = modeling_sgt.SgtForCausalLM(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.2)
        else:
            weight.data.uniform_(0.5, 1.5)
    return model


def read(
    model: Any, dtype: torch.dtype, device: str, sequences: int, padding: int
) -> tuple[torch.Tensor, list[int]]:
    """Logits of the last prompt token and of each after it, and how full the cache layers are."""
    model = model.to(device, dtype)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 97, (sequences, PROMPT + TOKENS), generator=generator).to(device)
    seen = torch.ones_like(ids)
    seen[0, :padding] = 0
    positions = (seen.cumsum(1) - 1).clamp_min(0)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
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


def main(device: str) -> None:
    usual, calls = modeling_sgt.takes_token, 0

    def kernels(attention: Any, hidden: torch.Tensor, *others: Any) -> bool:
        nonlocal calls
        taken = hidden.shape[1] == 1 if device == "cpu" else usual(attention, hidden, *others)
        calls += taken
        return taken

    for dtype, attention, sequences, padding in CASES:
        modeling_sgt.takes_token, calls = kernels, 0
        ours, ours_full = read(build(attention), dtype, device, sequences, padding)
        modeling_sgt.takes_token = lambda *_: False
        plain, plain_full = read(build(attention), dtype, device, sequences, padding)
        exact, _ = read(build(attention), torch.float64, device, sequences, padding)
        case = {
            "case": f"{dtype}, {attention}, {sequences} sequences, {padding} padded",
            "calls": calls,
            "kernels": ((ours - exact).norm() / exact.norm()).item(),
            "plain": ((plain - exact).norm() / exact.norm()).item(),
            "full": [ours_full, plain_full],
        }
        print(json.dumps(case), flush=True)
    modeling_sgt.takes_token = usual


if __name__ == "__main__":
    main(sys.argv[1])
