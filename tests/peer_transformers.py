"""`transformers`' Llama at the shape of a preset, in a plain DDP loop, for `peers.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from sgt_ds.model import llama_shape

if TYPE_CHECKING:
    from peers import Setting


def build(setting: Setting) -> torch.nn.Module:
    config = LlamaConfig(
        **llama_shape(setting.model),
        max_position_embeddings=setting.seq_len,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def train(
    setting: Setting, device: torch.device, update_done: Callable[[], None]
) -> torch.nn.Module:
    """Train; `update_done` is called after each update. Returns the model."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    with device:
        model = build(setting)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    compiled = torch.compile(replica)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-4, fused=True)
    shape = (setting.micro_batch_size, setting.seq_len)

    def micro_batch() -> None:
        ids = torch.randint(setting.model.vocab_size, shape, device=device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = compiled(input_ids=ids, labels=ids).loss
        (loss / setting.micro_batches).backward()

    for _ in range(setting.steps):
        with replica.no_sync():
            for _ in range(setting.micro_batches - 1):
                micro_batch()
        micro_batch()
        torch.nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        update_done()
    return model
