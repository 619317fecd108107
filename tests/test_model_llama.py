"""The vanilla model against stock `LlamaForCausalLM`: logits, loss and gradients."""

from __future__ import annotations

import pytest
import torch

from sgt_ds.config import PRESETS, ModelConfig
from sgt_ds.model import Transformer, from_llama_names, llama_shape, to_llama_names
from sgt_ds.model.loss import (
    CHUNK_ELEMENTS,
    as_it_is,
    chunked_next_token_loss,
    chunks_for,
)
from sgt_ds.model.norm import rms_norm

transformers = pytest.importorskip("transformers")

SHAPES = {
    "tiny": (PRESETS["tiny"], 3, 40),
    "one head": (ModelConfig(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=1, vocab_size=100), 2, 17),
    "wide heads, other theta and eps": (
        ModelConfig(
            hidden_size=96, intermediate_size=64, num_layers=3, num_heads=2, vocab_size=130,
            rope_theta=500.0, rms_norm_eps=1e-5,
        ),
        1,
        300,
    ),
    "demo": (PRESETS["demo"], 2, 256),
}  # fmt: skip


def llama_of(model: Transformer) -> torch.nn.Module:
    config = model.config
    stock = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama_shape(config)))
    stock.load_state_dict(to_llama_names(model.state_dict(), config), strict=True)
    return stock


@pytest.mark.parametrize("name", SHAPES)
def test_vanilla_logits_loss_and_gradients_part_from_llama(name: str) -> None:
    config, sequences, positions = SHAPES[name]
    model = Transformer(config, seed=7)
    with torch.no_grad():  # away from the initial weights, where a wrong RoPE or norm hardly shows
        for weight in model.parameters():
            weight.mul_(4.0 if weight.dim() > 1 else 1.0).add_(0.1 * (weight.dim() == 1))
    stock = llama_of(model)
    tokens = torch.randint(
        config.vocab_size, (sequences, positions + 1), generator=torch.Generator().manual_seed(1)
    )
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    logits = model(inputs).logits
    expected = stock(inputs).logits
    assert (logits - expected).abs().max() <= 1e-5

    loss = model(inputs, targets).loss
    loss.backward()
    stock_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten())
    stock_loss.backward()
    assert loss.item() == pytest.approx(stock_loss.item(), abs=1e-6)
    gradients = to_llama_names({n: p.grad for n, p in model.named_parameters()}, config)
    for weight_name, weight in stock.named_parameters():
        apart = (gradients[weight_name] - weight.grad).abs().max()
        assert apart <= 1e-5 * weight.grad.abs().max() + 1e-8, weight_name


def test_llama_names_lose_a_weight_or_mix_its_rows() -> None:
    model = Transformer(PRESETS["tiny"], seed=3)
    named = to_llama_names(model.state_dict(), model.config)
    back = from_llama_names(named, model.config)
    assert back.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(back[name], weight), name


def test_initial_weights_depend_on_more_than_the_seed() -> None:
    config = PRESETS["tiny"]
    first = Transformer(config, seed=5).state_dict()
    torch.manual_seed(99)  # the global generator has no say
    again = Transformer(config, seed=5, activation_checkpointing=True).state_dict()
    other = Transformer(config, seed=6).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    matrices = torch.cat([weight.flatten() for weight in first.values() if weight.dim() > 1])
    assert matrices.abs().max() <= 3 * config.init_std
    # A normal cut at three deviations keeps 0.98658 of its deviation.
    assert matrices.std().item() == pytest.approx(0.98658 * config.init_std, rel=5e-3)
    assert all((weight == 1).all() for weight in first.values() if weight.dim() == 1)


def test_an_engine_that_casts_the_module_casts_the_angles() -> None:
    tokens = torch.arange(64)[None]
    model = Transformer(PRESETS["tiny"], seed=2)
    stock_cos, stock_sin = llama_of(model).model.rotary_emb(torch.zeros(1), tokens)
    model.bfloat16()
    assert model(tokens).logits.dtype == torch.bfloat16
    cos, sin = model._rope.at(64, tokens.device)
    half = model.config.head_size // 2
    assert torch.equal(cos, stock_cos[0, :, :half])
    assert torch.equal(sin, stock_sin[0, :, :half])


def test_chunks_of_a_micro_batch_differ_in_size_or_hold_too_many_logits() -> None:
    vocabulary = 50304
    assert chunks_for(8 * 4096, vocabulary) == 8  # seven would do
    assert chunks_for(4096, vocabulary) == 1
    prime = 32_771
    assert chunks_for(prime, vocabulary) == 7
    for tokens in (4096, 8 * 4096, prime):
        most = -(-tokens // chunks_for(tokens, vocabulary))
        assert (most - 1) * vocabulary <= CHUNK_ELEMENTS


def test_a_loss_in_chunks_differs_from_the_whole() -> None:
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(2, 25, 12, generator=generator, dtype=torch.float64)
    weights = torch.randn(12, generator=generator, dtype=torch.float64)
    matrix = torch.randn(40, 12, generator=generator, dtype=torch.float64)
    targets = torch.randint(40, (2, 25), generator=generator)

    def run(chunks: int) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (states, weights, matrix)]
        if not chunks:  # by torch alone
            hidden = torch.nn.functional.rms_norm(leaves[0], (12,), leaves[1], 1e-6)
            logits = (hidden @ leaves[2].T).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, targets.flatten())
        else:
            normed = rms_norm(leaves[0], leaves[1], 1e-6)
            loss = chunked_next_token_loss(normed, leaves[2], targets, chunks, as_it_is)
            with torch.no_grad():
                evaluated = chunked_next_token_loss(normed, leaves[2], targets, chunks, as_it_is)
            assert abs(evaluated - loss) <= 1e-12
        (3.0 * loss).backward()
        return [loss, *(leaf.grad for leaf in leaves)]

    for chunks in (7, 5):  # 50 tokens: chunks of 7 and 8, and of 10
        for one, other in zip(run(chunks), run(0), strict=True):
            assert (one - other).abs().max() <= 1e-12
