"""Extra passes over one token by kernels, as an export on a GPU decodes: against plain operations."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import token_kernels
import torch
from pip_fetches import pip_or_skip
from torch import nn
from transformers import DynamicCache, StaticCache

from sgt_ds.inference.hf import modeling_sgt

ROOT = Path(__file__).parents[1]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where Triton lies that PyTorch for CPUs does not bring: beside the environment, not in it."""
    if importlib.util.find_spec("triton"):
        yield ""
        return
    place = tmp_path_factory.mktemp("triton")
    install = ["install", "--quiet", "--no-deps", "--target", str(place), "triton==3.6.0"]
    pip_or_skip(install, "Triton")
    yield str(place)
    shutil.rmtree(place)  # it is large


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_an_extra_pass_by_kernels_differs_from_plain_operations(device: str, triton: str) -> None:
    paths = os.pathsep.join(filter(None, [str(ROOT), triton, os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": paths}
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    run = subprocess.run(
        [sys.executable, token_kernels.__file__, device],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    *cases, beyond = map(json.loads, run.stdout.splitlines())
    assert len(cases) == len(token_kernels.CASES)
    for case in cases:
        assert case["calls"] == 2 * token_kernels.TOKENS, case  # of each looping layer
        assert case["full"] == [[token_kernels.PROMPT + token_kernels.TOKENS] * 6] * 2, case
        if "float32" in case["case"]:
            assert case["kernels"] < 1e-5, case
        assert case["kernels"] < 1.5 * case["plain"] + 1e-6, case
    assert beyond == {"kept": True, "finite": True}


class Asked:
    """What `takes_token` is asked, on a CPU that stands for a GPU."""

    def __init__(self) -> None:
        model = token_kernels.build().to(torch.bfloat16)
        self.layer = model.model.layers[1]
        self.attention, self.norm = self.layer.self_attn, self.layer.input_layernorm
        self.loop = model.config.loop_of(1)
        self.hidden = torch.zeros(1, 1, token_kernels.D, dtype=torch.bfloat16)
        self.mask = torch.ones(1, 1, 1, 45, dtype=torch.bool)
        self.cache: Any = StaticCache(config=model.config, max_cache_len=45)
        shape = (1, model.config.pass_heads(), token_kernels.SIZE)
        self.cache.early_initialization(*shape, torch.bfloat16, torch.device("cpu"))
        self.layers = self.cache.layers[3:5]

    def is_taken(self, **other: Any) -> bool:
        """With some of it replaced."""
        names = ("attention", "hidden", "loop", "norm", "mask", "cache", "layers")
        given = {name: getattr(self, name) for name in names} | other
        return modeling_sgt.takes_token(*(given[name] for name in names))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    monkeypatch.setattr(modeling_sgt, "triton", SimpleNamespace())
    monkeypatch.setattr(modeling_sgt, "_DEVICE", "cpu")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    with torch.inference_mode():
        yield Asked()


def test_kernels_take_an_input_that_they_do_not_compute(asked: Asked) -> None:
    assert asked.is_taken()
    hidden, mask, loop = asked.hidden, asked.mask, asked.loop
    assert not asked.is_taken(hidden=hidden.double())
    assert not asked.is_taken(hidden=hidden.float())
    assert not asked.is_taken(hidden=hidden.to("meta"))
    assert not asked.is_taken(hidden=hidden.expand(9, 1, -1))
    assert not asked.is_taken(hidden=hidden.expand(1, 2, -1))
    assert not asked.is_taken(mask=None)
    assert not asked.is_taken(mask=mask.float())
    assert not asked.is_taken(mask=mask[..., :-1])
    assert not asked.is_taken(mask=mask.expand(1, token_kernels.HEADS, 1, -1))
    assert not asked.is_taken(loop=loop._replace(heads=(0, 1, 2, 3, 4)))
    assert not asked.is_taken(loop=loop._replace(factors=((0.5, 1.0), (0.5, 1.0))))
    with mock.patch.object(torch.compiler, "is_compiling", return_value=False):
        assert not asked.is_taken()
    with torch.inference_mode(False), torch.enable_grad():
        assert not asked.is_taken()  # a gradient may be asked for
    asked.layer.train()
    assert not asked.is_taken()


def test_kernels_take_a_cache_that_they_do_not_know(asked: Asked) -> None:
    assert not asked.is_taken(layers=[])
    assert not asked.is_taken(layers=DynamicCache(config=asked.attention.config).layers[3:5])
    # Its layers are elsewhere until `Cache.update` fetches them.
    assert not asked.is_taken(cache=SimpleNamespace(offloading=True, layers=asked.cache.layers))
    first = asked.layers[0]
    keys = first.keys
    for other in (
        keys.to("meta"),
        keys.transpose(2, 3).contiguous().transpose(2, 3),
        keys.float(),
        keys.repeat(2, 1, 1, 1),
    ):
        first.keys = other
        assert not asked.is_taken()
    first.keys = keys
    assert asked.is_taken()


def test_kernels_take_weights_that_are_not_all_of_a_projection(asked: Asked) -> None:
    class Adapter(nn.Linear):
        pass

    norm, q_proj = asked.norm, asked.attention.q_proj
    assert not asked.is_taken(norm=nn.RMSNorm(token_kernels.D))
    norm.register_forward_hook(lambda *_: None)
    assert not asked.is_taken()
    norm._forward_hooks.clear()
    asked.attention.q_proj = Adapter(token_kernels.D, 320, bias=False, dtype=torch.bfloat16)
    assert not asked.is_taken()
    asked.attention.q_proj = q_proj.to("meta")
    assert not asked.is_taken()


def test_an_exported_graph_computes_heads_that_do_not_loop() -> None:
    model = token_kernels.build()
    program = torch.export.export(model, (torch.arange(12)[None],), {"use_cache": False})
    widths = Counter(
        node.meta["val"].shape[-1]
        for node in program.graph.nodes
        if node.target is torch.ops.aten.linear.default
    )
    # Queries, keys and values of all heads: of the main passes only.
    assert widths[token_kernels.HEADS * token_kernels.SIZE] == 3 * 3
    assert widths[3 * 2 * token_kernels.SIZE] == 2  # of two heads, in two extra passes


class Adapter(nn.Module):
    """A projection with an addition of its own; `weight` is the base's alone, as adapters have it."""

    def __init__(self, base: nn.Linear, delta: torch.Tensor) -> None:
        super().__init__()
        self.base_layer, self.weight, self.delta = base, base.weight, delta

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The base's answer and the addition's."""
        result: torch.Tensor = self.base_layer(x) + x @ self.delta.T
        return result


@pytest.mark.parametrize("scale", [None, {"0": [0.3, 0.6], "2": [1.0, 0.2]}])
def test_extra_passes_leave_out_an_adapter(scale: dict[str, list[float]] | None) -> None:
    """It counts in every pass, as it does once it is merged."""
    adapted, merged = token_kernels.build().double(), token_kernels.build().double()
    generator = torch.Generator().manual_seed(3)
    for model in (adapted, merged):
        if scale:
            model.config.loops["1"]["scale"] = scale
        model.model.layers[1].loop = model.config.loop_of(1)
    ours, theirs = (each.model.layers[1].self_attn for each in (adapted, merged))
    ids = torch.arange(24).view(2, 12)
    with torch.inference_mode():
        before = adapted(ids).logits
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            base = getattr(ours, name)
            delta = 0.2 * torch.randn(base.weight.shape, generator=generator, dtype=torch.double)
            setattr(ours, name, Adapter(base, delta))
            getattr(theirs, name).weight.add_(delta)
        assert (merged(ids).logits - before).abs().max() > 0.1
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits)
