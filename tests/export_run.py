"""One rank of a small real DeepSpeed run that saves the checkpoints which test_export.py converts.

Arguments: folder to write to, tokenizer file. Each scenario trains a few steps, saves as a run does,
and writes what the training model answers to `probe` beside the checkpoints.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from sgt_ds import checkpoints
from sgt_ds.config import ModelConfig
from sgt_ds.growth import Loop, State, passes_at
from sgt_ds.model import Transformer, loop_inputs

# The op would be compiled on first use, for most of a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

MODEL = ModelConfig(
    hidden_size=48, intermediate_size=80, num_layers=4, num_heads=4, vocab_size=300, init_std=0.2
)
STEP, INTERVAL = 6, 8
FIXED = Loop(depth=2, heads=(1, 3), scope="attention", step=0, entered=-8)
# scenario: method, its policy's entry, Θ, ZeRO stage, precision
SCENARIOS = {
    "vanilla": ("vanilla", "none", State(), 2, "fp32"),
    "fixed": ("sgt", "decay", State({2: FIXED, 3: FIXED}), 2, "fp32"),
    "decay": (
        "sgt",
        "decay",
        State({1: Loop(1, (0, 2), "attention", 4, 4, leaving=(1, 3)), 3: FIXED}, 1),
        1,
        "fp32",
    ),
    "decay begins": (
        "sgt",
        "decay",
        State({1: Loop(1, (0, 2), "attention", STEP, STEP, leaving=(1, 3))}, 1),
        2,
        "fp32",
    ),
    "ramp": ("sgt", "ramp", State({2: Loop(2, (0, 1), "attention", 0, 3)}, 2), 0, "fp32"),
    "ramp, narrowing": (
        "high_entropy_loop",
        "ramp",
        State({2: Loop(2, (0,), "attention", -4, 4, leaving=(1, 3))}),
        2,
        "fp32",
    ),
    "block": ("block_loop", "none", State({1: Loop(2, None, "block", 0, 0)}), 2, "fp32"),
    "attention": (
        "attention_loop",
        "none",
        State({1: Loop(1, (0, 1, 2, 3), "attention", 0, 0)}),
        2,
        "fp32",
    ),
    "bf16": ("sgt", "none", State({2: FIXED}), 2, "bf16"),
}


def probe() -> torch.Tensor:
    """Token ids, int64 (3, 17)."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, MODEL.vocab_size, (3, 17), generator=generator)


def train(name: str, folder: Path, tokenizer: str) -> None:
    """Train, save, and write the logits of the trained model."""
    method, entry, state, stage, precision = SCENARIOS[name]
    passes = passes_at(state, STEP, entry=entry, interval=INTERVAL, num_heads=MODEL.num_heads)
    loops = loop_inputs(passes, torch.device("cpu"))
    module = Transformer(MODEL, seed=1)
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "bf16": {"enabled": precision == "bf16"},
    }
    if precision == "bf16":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEP):
        ids = torch.randint(0, MODEL.vocab_size, (2, 17), generator=generator)
        loss = engine(ids[:, :-1], ids[:, 1:], loops=loops).loss
        engine.backward(loss)
        engine.step()
    facts = {
        "model": MODEL.model_dump(mode="json"),
        "method": method,
        "entry": entry,
        "interval": INTERVAL,
        "state": state.as_json(),
        "tokenizer": tokenizer,
        "sequence_length": 16,
        "tokens": STEP * 2 * 2 * 16,
        "flops": {"total": 1_010_000, "vanilla": 1_000_000, "per_token": 4321},
    }
    checkpoints.save(
        engine,
        folder / name / "checkpoints",
        step=STEP,
        state=facts,
        keep_last=3,
        group=dist.new_group(backend="gloo"),
    )
    if dist.get_rank() == 0:
        with torch.no_grad():
            logits = engine.module(probe(), loops=loops).logits
        torch.save(logits, folder / name / "logits.pt")
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for scenario in SCENARIOS:
        train(scenario, Path(sys.argv[1]), sys.argv[2])
    dist.destroy_process_group()
    # Interpreter shutdown after DeepSpeed now and then aborts in gloo; the work is done.
    sys.stdout.flush()
    os._exit(0)
