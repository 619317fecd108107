"""Torchtitan 0.2.2's own trainer at the shape of a preset, for `peers.py`. Measures nothing itself."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import Transformer, TransformerModelArgs, get_train_spec
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.train import Trainer

from sgt_ds.config import ModelConfig

if TYPE_CHECKING:
    from peers import Setting

NAME = "peer"


def arguments(model: ModelConfig) -> TransformerModelArgs:
    """The preset's shape.

    torchtitan takes 8/3 of the width times a factor as the feed-forward network's, and rounds it up
    to `multiple_of`: half of the wanted width, rounded up to the wanted width, is exact.
    """
    return TransformerModelArgs(
        dim=model.hidden_size,
        n_layers=model.num_layers,
        n_heads=model.num_heads,
        n_kv_heads=model.num_heads,
        vocab_size=model.padded_vocab_size,
        multiple_of=model.intermediate_size,
        ffn_dim_multiplier=model.intermediate_size / 2 / int(8 * model.hidden_size / 3),
        norm_eps=model.rms_norm_eps,
        rope_theta=model.rope_theta,
    )


def build(setting: Setting) -> torch.nn.Module:
    return Transformer(arguments(setting.model))


class RandomTokens:
    """In place of its loader: endless micro-batches on the host, int64 (sequences, positions)."""

    def __init__(self, setting: Setting) -> None:
        self.shape = (setting.micro_batch_size, setting.seq_len + 1)
        self.vocab_size = setting.model.vocab_size

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            ids = torch.randint(self.vocab_size, self.shape)
            yield {"input": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous()


def job(setting: Setting, folder: str) -> JobConfig:
    """Its defaults (fused AdamW, clipping at 1.0), but for what the docstring of `peers.py` names."""
    config = JobConfig()
    config.job.dump_folder = folder
    config.model.name, config.model.flavor = NAME, setting.preset
    own = setting.micro_batch_size * setting.micro_batches
    config.training.local_batch_size = setting.micro_batch_size
    config.training.global_batch_size = own * setting.gpus
    config.training.seq_len, config.training.steps = setting.seq_len, setting.steps
    config.activation_checkpoint.mode = "none"
    config.compile.enable = True
    config.metrics.log_freq = setting.steps + 1  # it logs the first update all the same
    return config


class Sharded(ParallelDims):
    """FSDP on one GPU too, where torchtitan would leave it out."""

    fsdp_enabled = True

    def _mesh_exist(self, name: str, degree: int) -> bool:
        return name == "fsdp" or bool(super()._mesh_exist(name, degree))


def train(
    setting: Setting, device: torch.device, update_done: Callable[[], None]
) -> torch.nn.Module:
    """Train; `update_done` is called after each update. Returns the model."""

    class Timed(Trainer):
        def init_distributed(self) -> ParallelDims:
            one = dict.fromkeys(("dp_replicate", "cp", "tp", "pp", "ep", "etp"), 1)
            ranks = super().init_distributed().world_size
            return Sharded(dp_shard=ranks, world_size=ranks, **one)

        def train_step(self, data_iterator: Iterator[Any]) -> None:
            super().train_step(data_iterator)
            update_done()

    spec = dataclasses.replace(
        get_train_spec(),
        model_args={setting.preset: arguments(setting.model)},
        build_dataloader_fn=lambda **_: RandomTokens(setting),
        build_tokenizer_fn=None,
        state_dict_adapter=None,
    )
    register_train_spec(NAME, spec)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Timed(job(setting, folder))
        (model,) = trainer.model_parts
        if device.type == "cpu":  # gloo has no sum with a factor, which torchtitan sets to 1
            for part in model.modules():
                if isinstance(part, FSDPModule):
                    part.set_force_sum_reduction_for_comms(True)
        trainer.train()
        trainer.close()
    return model
