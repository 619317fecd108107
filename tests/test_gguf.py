"""A vanilla export as GGUF: llama.cpp's own converter, run as docs/inference.md has it, read back
by the package `gguf` and by transformers.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from c4_files import texts_of, write_c4, write_tokenizer
from made_checkpoints import write_checkpoint
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor
from source_code import source_of
from transformers import AutoModelForCausalLM

from sgt_ds.cli import main
from sgt_ds.config import ModelConfig
from sgt_ds.model import Transformer

GUIDE = Path(__file__).parents[1] / "docs" / "inference.md"
SHAPE = ModelConfig(
    hidden_size=48, intermediate_size=80, num_layers=3, num_heads=4, vocab_size=320, init_std=0.2
)
WIDTH = SHAPE.hidden_size // SHAPE.num_heads
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(scope="module")
def llama_cpp(request: pytest.FixtureRequest) -> Path:
    """The sources of the version that the guide names: the converter is in no wheel."""
    pytest.importorskip("gguf")
    text = " ".join(GUIDE.read_text().split())
    (version,) = re.findall(r"`llama-cpp-python` also contains \(checked with ([\d.]+)\)", text)
    parts = ("/convert_hf_to_gguf.py", "/conversion/", "/gguf-py/")
    root = source_of("llama-cpp-python", version, parts, request.config)
    return root / "vendor" / "llama.cpp"


def export(folder: Path, tokenizer: Path) -> Path:
    """A vanilla model with norms as spread as training leaves them, converted as the guide asks."""
    model = Transformer(SHAPE, seed=4)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for vector in (p for p in model.parameters() if p.ndim == 1):
            vector.copy_(torch.exp(torch.randn(vector.shape, generator=generator) / 2))
    write_checkpoint(folder / "run", model, tokenizer=tokenizer, world_size=2)
    assert main(["convert", str(folder / "run"), "--out", str(folder / "out"), "--trim-vocab"]) == 0
    return folder / "out"


def run_converter(llama_cpp: Path, model: Path, file: Path) -> subprocess.CompletedProcess[str]:
    """The guide's command with these folders in place of its own."""
    (line,) = re.findall(r"^PYTHONPATH=\S+ python (\S+\.py .*)$", GUIDE.read_text(), re.MULTILINE)
    places = {"llama.cpp": str(llama_cpp), "exports/573m": str(model), "573m.gguf": str(file)}
    words = shlex.split(line)
    words[0] = words[0].replace("llama.cpp", places.pop("llama.cpp"), 1)
    command = [sys.executable, *(places.pop(word, word) for word in words)]
    assert not places
    environment = {**os.environ, "PYTHONPATH": str(llama_cpp / "gguf-py"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = write_c4(folder / "c4.json.gz", texts_of(200))
    file = folder / "tokenizer.model"
    size = str(SHAPE.vocab_size)
    assert main(["tokenizer", "train", str(texts), "--vocab-size", size, "--out", str(file)]) == 0
    return file


@pytest.fixture(scope="module")
def converted(
    llama_cpp: Path, sentencepiece_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """An export in bf16, and the GGUF made of it."""
    folder = tmp_path_factory.mktemp("gguf")
    out = export(folder, sentencepiece_file)
    done = run_converter(llama_cpp, out, folder / "model.gguf")
    assert done.returncode == 0, done.stderr[-3000:]
    return out, folder / "model.gguf"


def name_of(tensor: str) -> str:
    if tensor.removesuffix(".weight") in NAMES:
        return NAMES[tensor.removesuffix(".weight")] + ".weight"
    _, layer, part, _ = tensor.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"


def test_a_gguf_that_holds_other_weights_or_another_shape(converted: tuple[Path, Path]) -> None:
    """Bit for bit. llama.cpp turns neighbouring rows of a head together, transformers its halves."""
    gguf: Any = pytest.importorskip("gguf")
    out, file = converted
    reader = gguf.GGUFReader(file)
    weights = load_file(out / "model.safetensors")
    found: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        found[name_of(tensor.name)] = torch.from_numpy(np.array(values))
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        expected = tensor.float()
        if "q_proj" in name or "k_proj" in name:
            heads = expected.view(SHAPE.num_heads, 2, WIDTH // 2, SHAPE.hidden_size)
            expected = heads.transpose(1, 2).reshape(expected.shape)
            assert not torch.equal(expected, tensor.float())
        assert torch.equal(found[name], expected), name
    expected_fields = {
        "general.architecture": "llama",
        "llama.block_count": SHAPE.num_layers,
        "llama.embedding_length": SHAPE.hidden_size,
        "llama.feed_forward_length": SHAPE.intermediate_size,
        "llama.attention.head_count": SHAPE.num_heads,
        "llama.rope.dimension_count": WIDTH,
        "llama.rope.freq_base": SHAPE.rope_theta,
        "llama.attention.layer_norm_rms_epsilon": pytest.approx(SHAPE.rms_norm_eps),
        "llama.vocab_size": SHAPE.vocab_size,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.eos_token_id": 2,
    }
    told = {key: reader.get_field(key).contents() for key in expected_fields}
    assert told == expected_fields


def test_a_gguf_whose_pieces_are_others_than_the_tokenizers(
    converted: tuple[Path, Path], sentencepiece_file: Path
) -> None:
    gguf: Any = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(converted[1])
    pieces = SentencePieceProcessor(model_file=str(sentencepiece_file))
    ids = range(pieces.get_piece_size())
    assert reader.get_field("tokenizer.ggml.tokens").contents() == list(
        map(pieces.id_to_piece, ids)
    )
    scores = reader.get_field("tokenizer.ggml.scores").contents()
    assert scores == pytest.approx(list(map(pieces.get_score, ids)))


def test_a_gguf_that_answers_otherwise_than_its_export(converted: tuple[Path, Path]) -> None:
    """Read by transformers, which puts the rows of W_q and W_k back by code of its own."""
    out, file = converted
    ids = torch.randint(0, SHAPE.vocab_size, (3, 40), generator=torch.Generator().manual_seed(5))
    plain: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    again: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    with torch.no_grad():
        expected, logits = plain(ids).logits, again(ids).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)


def test_a_byte_level_tokenizer_is_converted_after_all(llama_cpp: Path, tmp_path: Path) -> None:
    """The guide says that the converter refuses one that it does not know."""
    out = export(tmp_path, write_tokenizer(tmp_path / "tokenizer.json", SHAPE.vocab_size))
    done = run_converter(llama_cpp, out, tmp_path / "model.gguf")
    assert done.returncode
    assert "get_vocab_base_pre" in done.stderr
