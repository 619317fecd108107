"""Extra passes over one token by kernels, as an export on a GPU decodes: against plain operations."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import token_kernels
import torch
from transformers import DynamicCache, StaticCache

from sgt_ds.inference.hf import modeling_sgt

ROOT = Path(__file__).parents[1]
GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU, reason="no GPU")


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where Triton lies that PyTorch for CPUs does not bring: beside the environment, not in it."""
    if importlib.util.find_spec("triton"):
        return ""
    place = str(tmp_path_factory.mktemp("triton"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place]
    done = subprocess.run(
        [*pip, "triton==3.6.0"], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        pytest.skip(f"pip cannot install Triton: {done.stderr.strip().splitlines()[-1]}")
    return place


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
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    cases = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(cases) == len(token_kernels.CASES)
    for case in cases:
        assert case["calls"] == 2 * token_kernels.TOKENS, case  # of each looping layer
        assert case["full"] == [[token_kernels.PROMPT + token_kernels.TOKENS] * 6] * 2, case
        if "float32" in case["case"]:
            assert case["kernels"] < 1e-5, case
        assert case["kernels"] < 1.5 * case["plain"] + 1e-6, case


@needs_gpu
def test_kernels_take_what_they_do_not_compute() -> None:
    model = token_kernels.build("sdpa").to("cuda", torch.bfloat16)
    attention = model.model.layers[1].self_attn
    loop = model.config.loop_of(1)
    hidden = torch.zeros(1, 1, token_kernels.D, device="cuda", dtype=torch.bfloat16)
    mask = torch.ones(1, 1, 1, token_kernels.LENGTH, device="cuda", dtype=torch.bool)
    static = StaticCache(config=model.config, max_cache_len=token_kernels.LENGTH)
    shape = (1, model.config.pass_heads(), token_kernels.SIZE)
    static.early_initialization(*shape, torch.bfloat16, torch.device("cuda"))
    layers = static.layers[3:5]
    takes = modeling_sgt.takes_token
    with torch.inference_mode():
        assert takes(attention, hidden, loop, mask, layers)
        assert not takes(attention, hidden, loop, None, layers)
        assert not takes(attention, hidden, loop, mask.float(), layers)
        assert not takes(attention, hidden, loop, mask[..., :-1], layers)
        assert not takes(
            attention, hidden, loop, mask.expand(1, token_kernels.HEADS, 1, -1), layers
        )
        assert not takes(attention, hidden, loop, mask, [])
        assert not takes(attention, hidden, loop, mask, DynamicCache(config=model.config).layers)
        assert not takes(attention, hidden.cpu(), loop, mask, layers)
        assert not takes(attention, hidden.double(), loop, mask, layers)
        assert not takes(attention, hidden.expand(9, 1, -1), loop, mask, layers)
        assert not takes(attention, hidden.expand(1, 2, -1), loop, mask, layers)
        assert not takes(attention, hidden, loop._replace(heads=(0, 1, 2, 3, 4)), mask, layers)
        entering = loop._replace(factors=((0.5, 1.0), (0.5, 1.0)))
        assert not takes(attention, hidden, entering, mask, layers)
        attention.train()
        assert not takes(attention, hidden, loop, mask, layers)
        attention.eval()
    assert not takes(attention, hidden, loop, mask, layers)  # a gradient could be asked for
