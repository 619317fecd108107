"""The exported model's cache, held against the same model without one, in float64 and in float32."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import task_rows
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    StaticCache,
)

from sgt_ds.cli import main
from sgt_ds.config import ModelConfig
from sgt_ds.growth import Passes
from sgt_ds.inference import Sampling, TextGenerator
from sgt_ds.inference.hf.modeling_sgt import SgtConfig, SgtForCausalLM
from sgt_ds.model import Transformer, loop_inputs, to_llama_names

SHAPE = ModelConfig(
    hidden_size=48, intermediate_size=80, num_layers=4, num_heads=4, vocab_size=128, init_std=0.3
)
HALF = {"depth": 1, "heads": [1, 2], "scope": "attention", "scale": {"1": [0.5], "2": [0.25]}}
DEEP = {"depth": 3, "heads": [0, 3], "scope": "attention"}
BLOCK = {"depth": 2, "heads": None, "scope": "block"}
LOOPS: dict[str, dict[str, Any]] = {
    "one": {"3": DEEP},
    "several": {"1": HALF, "2": {**DEEP, "heads": [2]}, "3": DEEP},
    "block": {"0": BLOCK, "3": DEEP},
}
# What `loops` says, as the training model takes it.
PASSES = {
    "one": {3: Passes(3, "attention", (0, 3), None)},
    "several": {
        1: Passes(1, "attention", (1, 2), ((0.5, 0.25),)),
        2: Passes(3, "attention", (2,), None),
        3: Passes(3, "attention", (0, 3), None),
    },
    "block": {0: Passes(2, "block", None, None), 3: Passes(3, "attention", (0, 3), None)},
}


def build(loops: dict[str, Any], attention: str = "sdpa", seed: int = 0) -> SgtForCausalLM:
    """A model whose weights are far from 0, so that every pass moves the logits."""
    config = SgtConfig(
        vocab_size=SHAPE.padded_vocab_size,
        hidden_size=SHAPE.hidden_size,
        intermediate_size=SHAPE.intermediate_size,
        num_hidden_layers=SHAPE.num_layers,
        num_attention_heads=SHAPE.num_heads,
        initializer_range=SHAPE.init_std,
        max_position_embeddings=96,
        bos_token_id=None,
        eos_token_id=None,
        loops=loops,
    )
    torch.manual_seed(seed)
    model = SgtForCausalLM._from_config(config, attn_implementation=attention)
    return model.eval()


def tokens(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, SHAPE.vocab_size, (rows, length), generator=generator)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", LOOPS)
def test_cached_passes_equal_the_uncached_training_model(name: str, attention: str) -> None:
    """float64: one go, chunks, token by token; both kinds of cache; against another code base."""
    model = build(LOOPS[name], attention).double()
    trained = Transformer(SHAPE, seed=0).double()
    model.load_state_dict(to_llama_names(dict(trained.named_parameters()), SHAPE))
    ids = tokens(2, 24)
    with torch.no_grad():
        loops = loop_inputs(PASSES[name], torch.device("cpu"))
        expected = trained(ids, loops=loops).logits
        assert (model(ids, use_cache=False).logits - expected).abs().max() < 1e-9
        for edges in ([0, 24], [0, 7, 8, 20, 24], [0, 1, *range(2, 25)]):
            for cache in (
                DynamicCache(config=model.config),
                StaticCache(config=model.config, max_cache_len=32),
            ):
                spans = itertools.pairwise(edges)
                chunks = [model(ids[:, a:b], past_key_values=cache).logits for a, b in spans]
                assert (torch.cat(chunks, 1) - expected).abs().max() < 1e-9
    extra = model.config.pass_heads()[SHAPE.num_layers :]
    held = [layer.keys.shape[1] for layer in cache.layers][SHAPE.num_layers :]
    assert held == extra  # only the looping heads are kept


def test_greedy_text_is_the_same_with_and_without_a_cache_on_200_prompts() -> None:
    """float32, token for token; lengths differ, so half of each batch is padded on the left."""
    model = build(LOOPS["several"])
    for batch in range(10):
        ids = tokens(20, 12, seed=batch)
        mask = torch.ones_like(ids)
        mask[::2, : 1 + batch] = 0
        ids = ids * mask
        common = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
        plain = model.generate(ids, use_cache=False, pad_token_id=0, **common)
        for kind in (None, "static") if batch < 3 else (None,):
            cached = model.generate(ids, cache_implementation=kind, pad_token_id=0, **common)
            assert torch.equal(plain, cached)


@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3},
        {"prefill_chunk_size": 5},
        {"num_beams": 2, "cache_implementation": "static"},
    ],
    ids=str,
)
def test_beams_and_chunked_prefill_follow_the_loops(how: dict[str, Any]) -> None:
    model = build(LOOPS["block"]).double()
    common = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    ids = tokens(3, 9)
    plain = model.generate(ids, use_cache=False, num_beams=how.get("num_beams", 1), **common)
    assert torch.equal(plain, model.generate(ids, **how, **common))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_on_the_left_changes_no_logit(attention: str) -> None:
    model = build(LOOPS["several"], attention).double()
    short, long = tokens(1, 6), tokens(1, 15, seed=2)
    padded = torch.cat([torch.zeros(1, 9, dtype=torch.int64), short], 1)
    batch = torch.cat([padded, long])
    mask = (batch > 0).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        together = model(batch, attention_mask=mask, position_ids=positions).logits
        assert (together[:1, 9:] - model(short).logits).abs().max() < 1e-9
        assert (together[1:] - model(long).logits).abs().max() < 1e-9


def test_without_loops_the_class_is_llama() -> None:
    model = build({})
    llama = LlamaForCausalLM(model.config)
    llama.load_state_dict(model.state_dict())
    with torch.no_grad():
        ids = tokens(2, 20)
        torch.testing.assert_close(model(ids).logits, llama.eval()(ids).logits)


def test_checkpointed_gradients_cover_the_loops() -> None:
    model, ids = build(LOOPS["several"]).double().train(), tokens(2, 16)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    plain = gradients()
    model.gradient_checkpointing_enable()
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-10, atol=1e-12)


def test_one_compiled_graph_decodes_every_token() -> None:
    """No graph break, and no new graph for a new position."""
    model, ids = build(LOOPS["several"]), tokens(2, 12)
    graphs = 0

    def count(graph: Any, _: Any) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph.forward  # type: ignore[no-any-return]

    torch._dynamo.reset()
    step = torch.compile(model.forward, fullgraph=True, backend=count, dynamic=False)
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        expected = model(ids).logits
        model(ids[:, :4], past_key_values=cache)
        for at in range(4, 12):
            position = torch.tensor([[at]]).expand(2, 1)
            one = step(ids[:, at : at + 1], past_key_values=cache, position_ids=position).logits
            torch.testing.assert_close(one[:, 0], expected[:, at], rtol=1e-4, atol=1e-4)
    assert graphs == 1


def test_continuous_batching_is_not_offered_to_loops() -> None:
    """Its paged cache would let the passes of a layer overwrite each other."""
    assert not hasattr(build(LOOPS["one"]), "init_continuous_batching")
    assert callable(build({}).init_continuous_batching)


def test_attention_maps_and_hidden_states_count_layers_not_passes() -> None:
    model = build(LOOPS["block"], "eager")
    answer = model(tokens(1, 8), output_attentions=True, output_hidden_states=True)
    assert len(answer.attentions) == SHAPE.num_layers
    assert len(answer.hidden_states) == SHAPE.num_layers + 1


@pytest.mark.parametrize(
    "loop",
    [
        {"depth": 0, "heads": [0], "scope": "attention"},
        {"depth": 1, "heads": [4], "scope": "attention"},
        {"depth": 1, "heads": [1, 0], "scope": "attention"},
        {"depth": 2, "heads": [0], "scope": "attention", "scale": {"0": [1.0]}},
        {"depth": 1, "heads": [0], "scope": "mlp"},
    ],
)
def test_a_loop_that_cannot_run_is_refused(loop: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="loops: layer 2"):
        build({"2": loop})


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A looping model with a tokenizer of one token a character."""
    folder = tmp_path_factory.mktemp("export")
    build(LOOPS["several"], seed=3).save_pretrained(folder)
    letters = {chr(97 + n): n + 2 for n in range(26)} | {"▁": 28, "<|endoftext|>": 0, "<unk>": 1}
    letters |= {f"{a}{b}": 29 + n for n, (a, b) in enumerate(itertools.product("abcdefgh", "ijk"))}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    fast.save_pretrained(folder)
    suppressed = [i for i in range(SHAPE.padded_vocab_size) if i not in letters.values()]
    generation = GenerationConfig(eos_token_id=0, pad_token_id=0, suppress_tokens=suppressed)
    generation.save_pretrained(folder)
    return folder


def test_streamed_text_is_the_text_and_stops_before_a_stop_text(export: Path) -> None:
    text_generator = TextGenerator(export)
    sampling = Sampling(max_new_tokens=40, temperature=1.0, seed=4)
    (whole,) = text_generator.complete(["hello"], sampling)
    assert whole.tokens > 10
    pieces: list[str] = []
    (streamed,) = text_generator.complete(["hello"], sampling, on_text=pieces.append)
    assert "".join(pieces) == whole.text == streamed.text
    assert len(pieces) > 3
    stop = whole.text[7:10]
    cut = Sampling(max_new_tokens=40, temperature=1.0, seed=4, stop=(stop,))
    pieces.clear()
    (stopped,) = text_generator.complete(["hello"], cut, on_text=pieces.append)
    assert "".join(pieces) == stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.finish == "stop"


def test_a_prompt_says_the_same_in_a_batch_and_alone(export: Path) -> None:
    text_generator = TextGenerator(export)
    prompts = ["a", "hello▁world", "", "the▁quick▁brown▁fox"]
    sampling = Sampling(max_new_tokens=16)
    together = list(text_generator.complete(prompts, sampling, batch_size=4))
    alone = list(text_generator.complete(prompts, sampling, batch_size=1))
    assert [c.text for c in together] == [c.text for c in alone]
    assert [c.prompt_tokens for c in together] == [1, 11, 1, 19]


def test_the_default_takes_a_short_model_beyond_its_positions_with_half_a_sentence(
    export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text_generator = TextGenerator(export)
    prompts = ["a", "ab" * 40, "b" * 95]  # of 96 positions
    together = list(text_generator.complete(prompts, Sampling(), batch_size=3))
    assert [(each.prompt_tokens, each.tokens) for each in together[1:]] == [(80, 16), (95, 1)]
    alone = list(text_generator.complete(prompts, Sampling(), batch_size=1))
    assert [each.text for each in alone] == [each.text for each in together]
    assert text_generator.warnings(prompts, Sampling()) == []
    command = ["generate", str(export), "--prompt", "a", "--prompt", "b" * 90]
    assert main([*command, "--max-new-tokens", "7"]) == 0
    said = "sgt-ds generate: warning: prompt '" + "b" * 39 + "…' of 90 tokens: "
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{said}--max-new-tokens 7 exceeds the 96 positions that the model was")
    assert line.endswith("; give 6 or less")
    assert main([*command, "--prompt", "b" * 96]) == 0
    assert "' of 96 tokens: fills the 96 positions" in capsys.readouterr().err


def test_a_row_that_stopped_counts_what_fills_it_up_to_the_longest(export: Path) -> None:
    text_generator = TextGenerator(export)
    # A token of its own to pad with, unlike the end of a text.
    text_generator.tokenizer.pad_token = "<unk>"
    text_generator.model.generation_config.pad_token_id = text_generator.tokenizer.pad_token_id
    prompts = ["a", "hello", "the▁quick"]
    whole = list(text_generator.complete(prompts, Sampling(max_new_tokens=24), batch_size=3))
    stop = whole[1].text[4:7]
    sampling = Sampling(max_new_tokens=24, stop=(stop,))
    together = list(text_generator.complete(prompts, sampling, batch_size=3))
    alone = list(text_generator.complete(prompts, sampling, batch_size=1))
    assert [(c.text, c.tokens, c.finish) for c in together] == [
        (c.text, c.tokens, c.finish) for c in alone
    ]
    assert together[1].finish == "stop"
    assert together[1].tokens < max(c.tokens for c in together)


def test_streamed_prompts_are_drawn_unlike_those_taken_one_by_one(
    export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = ["--temperature", "1", "--seed", "4", "--max-new-tokens", "12"]
    command = ["generate", str(export), "--prompt", "hello", "--prompt", "hello", *drawn]
    assert main([*command, "--stream"]) == 0
    streamed = capsys.readouterr().out
    assert main([*command, "--batch-size", "1"]) == 0
    assert streamed == capsys.readouterr().out
    first, second = streamed.splitlines()
    assert first != second


def test_generate_prints_one_document_and_the_seed_decides(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n\nwor\u2028ld\n")
    texts = []
    for seed in ("1", "1", "2"):
        flags = ["--temperature", "1", "--top-p", "0.95", "--top-k", "50", "--seed", seed]
        command = ["generate", str(export), "--prompts", str(prompts), "--json", *flags]
        assert main(command) == 0
        document = json.loads(capsys.readouterr().out)
        assert [c["prompt"] for c in document["completions"]] == ["hello", "wor\u2028ld"]
        texts.append([c["text"] for c in document["completions"]])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--prompt", "a", "--top-p", "0"], "--top-p"),
        (["--prompt", "a", "--stream", "--json"], "--json"),
        (["--prompts", "no/such/file"], "no/such/file: cannot be read (No such file"),
    ],
)
def test_bad_usage_is_one_line(
    arguments: list[str], told: str, export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(export), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_no_tokens_to_generate_is_refused_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", "no/such/export", "--prompt", "a", "--max-new-tokens", "0"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--max-new-tokens: '0' is not a whole number from 1" in line


@pytest.mark.parametrize(
    ("device", "gpus", "told"),
    [
        ("cuda:7", 2, "'cuda:7' does not exist here; give cpu, or cuda:0 to cuda:1"),
        ("cuda:7", 0, "cuda:7: torch sees no GPU here; use --device cpu"),
        ("gpu0", 1, "'gpu0' is not a device; give cpu, or cuda:0"),
        ("mps", 0, "'mps' cannot be used here; give cpu"),
        ("meta", 0, "'meta' cannot be used here; give cpu"),
        ("hpu", 0, "'hpu' cannot be used here; give cpu"),
    ],
)
def test_a_device_that_is_not_there_is_told_late_or_in_torchs_words(
    device: str,
    gpus: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for command in (
        ["generate", str(tmp_path / "none"), "--prompt", "a"],
        ["eval", "tasks", str(tmp_path), "--tasks", "sciq", "--data", str(tmp_path)],
        ["eval", "perplexity", str(tmp_path / "none"), str(tmp_path)],
    ):
        assert main([*command, "--device", device]) == 2
        assert capsys.readouterr().err == f"sgt-ds: --device: {told}\n"


def test_a_folder_that_is_no_export_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is not an export" in line
    for text in ("{}", "[]", '{"model_type": "gpt2"}'):
        (tmp_path / "config.json").write_text(text)
        assert main(["generate", str(tmp_path), "--prompt", "a"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{tmp_path / 'config.json'}: model_type: " in line
        assert "give a folder written by `sgt-ds convert`" in line


def test_a_damaged_export_is_a_traceback_or_told_without_a_remedy(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, text = tmp_path / "export", tmp_path / "text.txt"
    shutil.copytree(export, folder)
    text.write_text("hello\n")
    rows = task_rows.write_rows(tmp_path / "rows", task_rows.made_rows(2))
    commands = (
        ["generate", str(folder), "--prompt", "a"],
        ["eval", "perplexity", str(folder), str(text)],
        ["eval", "tasks", str(folder), "--tasks", "sciq", "--data", str(rows)],
    )

    def told() -> set[str]:
        capsys.readouterr()
        lines = []
        for command in commands:
            assert main([*command, "--device", "cpu"]) == 2
            lines += capsys.readouterr().err.splitlines()
        assert len(lines) == len(commands)
        return set(lines)

    remedy = "; copy it again, or convert again"
    weights, tokenizer = folder / "model.safetensors", folder / "tokenizer.json"
    for size in (weights.stat().st_size // 2, 0):
        os.truncate(weights, size)
        (line,) = told()
        assert line.startswith(f"sgt-ds: {weights}: cannot be loaded (Error while deserializing")
        assert line.endswith(remedy)
    shutil.copyfile(export / weights.name, weights)
    config = folder / "config.json"
    for key, value in (("num_hidden_layers", "x"), ("vocab_size", -4)):
        config.write_text(json.dumps(json.loads((export / config.name).read_text()) | {key: value}))
        (line,) = told()
        assert line.startswith(f"sgt-ds: {folder}: cannot be loaded (")
    shutil.copyfile(export / config.name, config)
    tokenizer.write_text('{"model": {"type": "none"}, "added_tokens": []}')
    (line,) = told()
    assert line.startswith(f"sgt-ds: {folder}: cannot be loaded (")
    assert line.endswith(remedy)
    remedy = "copy all of the model's files, or convert again with --tokenizer FILE"
    tokenizer.unlink()
    assert told() == {f"sgt-ds: {folder}: tokenizer.json: is missing; {remedy}"}
    # Without it a tokenizer loads that knows no end: other text and other losses, and no word.
    shutil.copyfile(export / tokenizer.name, tokenizer)
    (folder / "tokenizer_config.json").unlink()
    for model_type in ("sgt", "llama"):
        config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": model_type}))
        assert told() == {f"sgt-ds: {folder}: tokenizer_config.json: is missing; {remedy}"}
    tokenizer.unlink()
    assert told() == {f"sgt-ds: {folder}: tokenizer.json: is missing; {remedy}"}


@pytest.mark.parametrize("where", ["auto", "disk"])
def test_weights_that_a_device_map_keeps_elsewhere_reach_the_loops(
    where: str, tmp_path: Path
) -> None:
    """`disk`: every layer's weights come from there, pass by pass."""
    model, ids = build(LOOPS["several"]), tokens(2, 9)
    model.save_pretrained(tmp_path / "model")
    device_map: Any = where
    if where == "disk":
        device_map = {f"model.layers.{n}": "disk" for n in range(SHAPE.num_layers)}
        device_map |= dict.fromkeys(
            ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
        )
    loaded = SgtForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    if where == "disk":
        assert loaded.model.layers[3].self_attn.q_proj.weight.is_meta
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    text = loaded.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(text, expected)
