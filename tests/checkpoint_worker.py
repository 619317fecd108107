"""One rank of a small DeepSpeed run that saves and loads: what test_checkpoints.py starts.

Arguments: the folder of checkpoints, and JSON: steps, every, keep_last; load, fork: what to start
from; width; stage; bf16; decay, adam: settings of the optimizer; fail: [rank, step] that meets a full
disk; background: save as a run does.
Prints one JSON line a step, and digests of weights and optimizer.
"""

from __future__ import annotations

import hashlib
import json
import random
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.ops import __compatible_ops__

from sgt_ds import checkpoints
from sgt_ds.errors import SgtError

BATCH = 8


def digest(engine: Any) -> str:
    """Of all master weights and moments, joined over the ranks and without their padding."""
    if engine.zero_optimization_stage() == 0:  # no partitions
        return ""
    zero, content = engine.optimizer, hashlib.sha256()
    for index, master in enumerate(zero.single_partition_of_fp32_groups):
        lean = master.numel() - zero.groups_padding[index]
        state = zero.optimizer.state[zero.optimizer.param_groups[index]["params"][0]]
        for tensor in (master, state["exp_avg"], state["exp_avg_sq"]):
            shares: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(shares, tensor.detach()[:lean].clone())
            content.update(torch.cat(shares).numpy().tobytes())
    return content.hexdigest()


def build(settings: dict[str, Any], world_size: int) -> Any:
    torch.manual_seed(0)
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    width = settings.get("width", 37)  # odd: the partitions need padding
    model = torch.nn.Sequential(
        torch.nn.Linear(9, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, 9)
    )
    decay = settings.get("decay", 0.1)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // world_size,
        "zero_optimization": {"stage": settings.get("stage", 2)},
        "bf16": {"enabled": settings.get("bf16", False)},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }
    adam = torch.optim.AdamW(groups, lr=1e-2, **settings.get("adam", {}))
    return deepspeed.initialize(model=model, optimizer=adam, config=config)[0]


@contextmanager
def full_disk(full: bool) -> Iterator[None]:
    """A real limit of the system on the size of files that this process writes."""
    if full:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def main(directory: Path, settings: dict[str, Any]) -> None:
    __compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    group, rank, world_size = dist.new_group(), dist.get_rank(), dist.get_world_size()
    engine = build(settings, world_size)
    step = 0
    if settings.get("load") == "newest":
        found = checkpoints.newest_good_for_all(directory, group)
        assert found is not None
        state = checkpoints.load(engine, found.path, group=group)
        step = state["step"]
        assert state["words"] == ["für", step]
        say(rank, loaded=step, digest=digest(engine))
    elif "fork" in settings:
        checkpoints.load_weights_only(engine, Path(settings["fork"]), group=group)
        say(rank, forked=engine.global_steps, digest=digest(engine))
        names = ("lr", "betas", "eps", "weight_decay")
        groups = engine.optimizer.param_groups
        say(rank, adam=[[group[name] for name in names] for group in groups])
    while step < settings["steps"]:
        data = torch.randn(BATCH, 9, generator=torch.Generator().manual_seed(step))
        mine = data[rank * BATCH // world_size : (rank + 1) * BATCH // world_size]
        loss = (engine(mine) - mine).pow(2).mean() * (1 + 0.1 * random.random() * np.random.rand())
        engine.backward(loss)
        engine.step()
        step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        say(rank, step=step, loss=float(mean).hex())
        if step % settings["every"] == 0:
            with full_disk(settings.get("fail") == [rank, step]):
                try:
                    checkpoints.save(
                        engine,
                        directory,
                        step=step,
                        state={"words": ["für", step]},
                        keep_last=settings.get("keep_last", 2),
                        group=group,
                    )
                except SgtError as error:
                    print(json.dumps({"rank": rank, "failed": str(error)}), flush=True)
    say(rank, digest=digest(engine))
    dist.barrier()


def say(rank: int, **facts: Any) -> None:
    if rank == 0:
        print(json.dumps(facts), flush=True)


def status() -> int:
    """Of `main`. What an error holds is gone on return: a group that outlives it may abort the end."""
    try:
        main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    except SgtError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    finally:
        dist.destroy_process_group()  # gloo's threads may abort a process that just ends
    return 0


if __name__ == "__main__":
    sys.exit(status())
