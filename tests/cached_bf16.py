"""How often a cache changes a greedy text in bfloat16: loops beside stock LLaMA of the same shape.

Run by hand, on a GPU where there is one: `python tests/cached_bf16.py`. 200 prompts of 16 tokens, 24
more each; the prompt in one go, in chunks of five, and token by token, and with a static cache (on a
GPU compiled as well). The same weights; a text counts once, however it differs. A product of these
small matrices has the same bits on a GPU for one row and for many: `--width 1024` has the sizes of a
real model, whose products differ.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import LlamaForCausalLM

from sgt_ds.inference.hf.modeling_sgt import SgtConfig, SgtForCausalLM

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPTS, LENGTH, NEW, BATCH = 200, 16, 24, 8
DEEP = {"depth": 3, "heads": [0, 3], "scope": "attention"}
CASES: dict[str, dict[str, Any]] = {
    "stock llama": {},
    "sgt": {"3": DEEP, "4": {**DEEP, "depth": 2}, "5": {**DEEP, "depth": 1}},
    "block loop": {"3": {"depth": 1, "heads": None, "scope": "block"}},
}
WAYS: dict[str, dict[str, Any]] = {
    "one go": {},
    "chunks": {"prefill_chunk_size": 5},
    "token by token": {"prefill_chunk_size": 1},
    "static": {"cache_implementation": "static", "disable_compile": True},
}
if DEVICE.type == "cuda":  # where extra passes over one token are kernels of their own
    WAYS["compiled"] = {"cache_implementation": "static"}


def model(loops: dict[str, Any], width: int, seed: int) -> Any:
    """A model in bfloat16; width and seed alone decide its weights."""
    config = SgtConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=6,
        num_attention_heads=max(4, width // 64),
        num_key_value_heads=max(4, width // 64),
        initializer_range=0.06 * (128 / width) ** 0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        loops=loops,
    )
    torch.manual_seed(seed)
    text_generator = (SgtForCausalLM if loops else LlamaForCausalLM)(config)
    return text_generator.to(DEVICE, torch.bfloat16).eval()


def mismatches(loops: dict[str, Any], width: int, seed: int) -> dict[str, int]:
    """Texts of 200 that a cache changes, by the way of filling it."""
    text_generator, found = model(loops, width, seed), dict.fromkeys(WAYS, 0)
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, 512, (PROMPTS, LENGTH), generator=generator).to(DEVICE)
    for ids in prompts.split(BATCH):
        common = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW}
        common |= {"do_sample": False}
        plain = text_generator.generate(ids, use_cache=False, **common)
        for name, how in WAYS.items():
            cached = text_generator.generate(ids, **how, **common)
            found[name] += int((cached != plain).any(1).sum())
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--width", type=int, default=128, help="of the residual stream; a multiple of 64"
    )
    chosen = parser.parse_args()
    for seed in range(3):
        for name, loops in CASES.items():
            told = mismatches(loops, chosen.width, seed)
            print(f"seed {seed}  {name:<12} {told}", flush=True)
