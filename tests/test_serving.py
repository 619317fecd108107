"""Exports behind stock tools: `transformers serve` and the official client, an environment of torch
and transformers alone; memory of conversion.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from made_checkpoints import write_checkpoint
from pip_fetches import run_whole, skip_or_fail
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sgt_ds.config import ModelConfig
from sgt_ds.growth import Loop, State
from sgt_ds.inference import Sampling, TextGenerator, convert
from sgt_ds.model import Transformer
from sgt_ds.ports import free_ports

SHAPE = ModelConfig(
    hidden_size=48, intermediate_size=80, num_layers=4, num_heads=4, vocab_size=256, init_std=0.2
)
LOOPS = State({2: Loop(2, (1, 3), "attention", 0, 0), 3: Loop(1, (0,), "attention", 0, 0)})


def byte_tokenizer(path: Path) -> Path:
    """A tokenizer of single bytes, none of which ends a text but one that no text has."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = {"<|endoftext|>": 0, **{letter: n + 1 for n, letter in enumerate(alphabet[:255])}}
    tokenizer = Tokenizer(models.BPE(known, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A stock export and a looping one, with a tokenizer."""
    folder = tmp_path_factory.mktemp("serving")
    tokenizer = byte_tokenizer(folder / "tokenizer.json")
    cases = {"llama": ("vanilla", State()), "sgt": ("sgt", LOOPS)}
    for kind, (method, state) in cases.items():
        model = Transformer(SHAPE, seed=4)
        write_checkpoint(folder / kind, model, method=method, state=state, tokenizer=tokenizer)
        convert(folder / kind, folder / f"{kind}-export", dtype="fp32")
    return {kind: folder / f"{kind}-export" for kind in cases}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`transformers serve` as the docs start it; its address."""
    port = free_ports()
    command = [str(Path(sys.executable).with_name("transformers")), "serve", "--trust-remote-code"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    folder = tmp_path_factory.mktemp("server")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.kill()
            process.wait()


def wait_for(url: str, process: subprocess.Popen[Any], log: Any) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.2)
    log.seek(0)
    raise AssertionError(log.read()[-4000:])


@pytest.mark.parametrize("kind", ["llama", "sgt"])
def test_a_stock_server_that_says_something_else(
    kind: str, server: str, exports: dict[str, Path]
) -> None:
    """Greedy text, streamed to the official client and whole, against the model itself."""
    from openai import OpenAI

    prompt = "Once upon a time"
    text_generator = TextGenerator(exports[kind])
    (expected,) = text_generator.complete([prompt], Sampling(max_new_tokens=24))
    client = OpenAI(base_url=server, api_key="none", timeout=120, max_retries=0)
    asked = {"model": str(exports[kind]), "prompt": prompt, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked)
    # Bytes that are no whole character yet: the server's streamer keeps the last ones back.
    text = expected.text.rstrip("\ufffd")
    assert whole.choices[0].text.rstrip("\ufffd") == text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
    assert len(pieces) > 5
    assert "".join(pieces).rstrip("\ufffd") == text


def test_an_export_that_asks_for_more_than_torch_and_transformers(
    exports: dict[str, Path], tmp_path: Path
) -> None:
    """In a new virtual environment, by the script that does so for any export."""
    script = Path(__file__).with_name("fresh_venv.sh")
    given = {"PYTHON": sys.executable, "TRANSFORMERS": transformers.__version__}
    apart = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    # Of gigabytes: what is left of them where the script is stopped is not kept as a test's files.
    with tempfile.TemporaryDirectory(dir=tmp_path) as place:
        done = run_whole(
            ["sh", str(script), *map(str, exports.values())],
            env={**apart, **given, "TMPDIR": place},
            timeout=500,
        )
    if done.returncode == 3 or done.returncode < 0:
        skip_or_fail(done.stderr, "torch and transformers")
    assert done.returncode == 0, done.stderr[-3000:]
    versions, *said = done.stdout.splitlines()
    assert versions.split()[-1] == transformers.__version__
    for kind, line in zip(exports, said, strict=True):
        text_generator = TextGenerator(exports[kind])
        prompt = "Once upon a time"
        (expected,) = text_generator.complete([prompt], Sampling(max_new_tokens=16))
        name = {"llama": "LlamaForCausalLM", "sgt": "SgtForCausalLM"}[kind]
        assert line == f"{name} {prompt + expected.text!r}"


MEASURED = """
import sys, threading, time
from pathlib import Path
from sgt_ds.inference import convert
import sgt_ds.inference.hf.modeling_sgt, sgt_ds.inference.zero

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

most = before = anonymous()
def watch():
    global most
    while True:
        most = max(most, anonymous())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
report = convert(Path(sys.argv[1]), Path(sys.argv[2]), dtype=sys.argv[3], max_shard_size="40MB")
print(most - before, max(p.stat().st_size for p in Path(sys.argv[2]).glob("*.safetensors")))
"""


def test_a_conversion_that_holds_more_than_a_shard_and_a_tensor(tmp_path: Path) -> None:
    """260 MB of masters of four ranks; what mapped files take is the system's to give back."""
    shape = ModelConfig(
        hidden_size=512, intermediate_size=2048, num_layers=8, num_heads=8, vocab_size=32000
    )
    model = Transformer(shape)
    write_checkpoint(tmp_path / "run", model, world_size=4)
    largest = max(4 * p.numel() for p in model.parameters())
    total = sum(4 * p.numel() for p in model.parameters())
    assert total > 250e6
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "run"), str(tmp_path / "out"), "bf16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    more, shard = map(int, done.stdout.splitlines()[-1].split())
    print(f"{total / 1e6:.0f} MB of masters, {more / 1e6:.0f} MB more memory at most")
    assert more < shard + largest
    assert torch.tensor(total) > 2 * more
