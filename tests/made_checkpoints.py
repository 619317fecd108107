"""Checkpoints as DeepSpeed lays them out, written without training: no engine, no ranks to start."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sgt_ds.checkpoints import folder_name
from sgt_ds.checkpoints.manifest import Manifest, record_of, write_manifest
from sgt_ds.growth import State
from sgt_ds.model import Transformer

INTERVAL = 8


def write_checkpoint(
    run: Path,
    model: Transformer,
    *,
    method: str = "vanilla",
    state: State | None = None,
    entry: str = "none",
    step: int = 6,
    tokenizer: Path | None = None,
    world_size: int | None = None,
) -> Path:
    """A checkpoint of `model` under `run`. `world_size`: of ZeRO-2; None writes as ZeRO-0 does."""
    folder = run / "checkpoints" / folder_name(step)
    folder.mkdir(parents=True)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    model_file = folder / "mp_rank_00_model_states.pt"
    if world_size is None:
        torch.save({"module": weights}, model_file)
    else:
        shapes = OrderedDict((name, tensor.shape) for name, tensor in weights.items())
        torch.save({"param_shapes": [shapes]}, model_file)
        flat = torch.cat([tensor.flatten() for tensor in weights.values()])
        size = -(-flat.numel() // (2 * world_size)) * 2
        for rank in range(world_size):
            part = flat[rank * size : (rank + 1) * size].clone()
            values = {
                "partition_count": [world_size],
                "single_partition_of_fp32_groups": [part],
            }
            name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": values}, folder / name)
    facts: dict[str, Any] = {
        "format": 1,
        "version": "test",
        "step": step,
        "world_size": world_size or 1,
        "model": model.config.model_dump(mode="json"),
        "method": method,
        "entry": entry,
        "interval": INTERVAL,
        "state": (state or State()).as_json(),
        "tokenizer": None if tokenizer is None else str(tokenizer),
        "sequence_length": 64,
        "tokens": 1000,
        "flops": {"total": 1, "vanilla": 1, "per_token": 1},
    }
    (folder / "state.json").write_text(json.dumps(facts))
    for rank in range(world_size or 1):
        random_state = {"cpu": torch.zeros(1, dtype=torch.uint8)}
        save_file(random_state, folder / f"rng_rank_{rank:05d}.safetensors")
    files = {path.name: record_of(path) for path in folder.iterdir()}
    write_manifest(folder, Manifest(step, 0, world_size or 1, files))
    return folder
