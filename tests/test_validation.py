"""The validation loss: what it holds in memory beside training."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sgt_ds.config import PRESETS
from sgt_ds.data import MicroBatch
from sgt_ds.model import Transformer
from sgt_ds.training.engine import Ranks
from sgt_ds.training.heartbeat import Heartbeat
from sgt_ds.training.validation import ValidationLoss

CPU = torch.device("cpu")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Ranks]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Ranks(0, 0, 1, CPU, dist.group.WORLD)
    dist.destroy_process_group()


def test_a_micro_batch_is_validated_while_the_one_before_holds_its_activations(
    alone: Ranks, tmp_path: Path
) -> None:
    model = Transformer(PRESETS["tiny"])
    graphs: list[weakref.ref[Any]] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        assert not any(graph() is not None for graph in graphs), "an earlier graph is still there"
        output = model(*arguments, **options)
        graphs.append(weakref.ref(output.loss))
        return output

    tokens = torch.randint(PRESETS["tiny"].vocab_size, (3, 2, 17))
    batches = [MicroBatch(batch, None) for batch in tokens]
    heartbeat = Heartbeat(tmp_path, 0, hang_seconds=60, patient_seconds=60)
    loss = ValidationLoss(watched, lambda: batches, alone, heartbeat)({})
    assert len(graphs) == 3
    with torch.no_grad():
        whole = model(tokens[:, :, :-1].flatten(0, 1), tokens[:, :, 1:].flatten(0, 1)).loss
    assert loss == pytest.approx(whole.item(), rel=1e-6)
