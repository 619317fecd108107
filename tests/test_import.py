"""Training starts, held against the stock LLaMA that they were made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import yaml
from made_checkpoints import write_checkpoint
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from sgt_ds.checkpoints import read_start
from sgt_ds.cli import main
from sgt_ds.config import PRESETS, ModelConfig
from sgt_ds.data import open_token_set
from sgt_ds.errors import UserError
from sgt_ds.flops import parameter_count
from sgt_ds.inference import convert, import_model
from sgt_ds.model import Transformer
from sgt_ds.training.start import checked_start, start_weights

LENGTH = 32
BF16 = Path(__file__).parents[1] / "ds_configs" / "zero2_bf16_cpu.json"


def llama(**changes: Any) -> LlamaForCausalLM:
    """A stock model with random weights far enough from 0 that every part moves the logits."""
    torch.manual_seed(3)
    values: dict[str, Any] = {
        "vocab_size": 384,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "initializer_range": 0.15,
    }
    return LlamaForCausalLM(LlamaConfig(**{**values, **changes})).eval()


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, torch.float32),
        (
            {"tie_word_embeddings": True, "num_key_value_heads": 2, "vocab_size": 300},
            torch.bfloat16,
        ),
    ],
    ids=["plain, in shards", "shared embeddings, grouped heads, padded, bf16"],
)
def test_a_start_that_computes_something_else_than_its_source(
    changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    stock = llama(**changes).to(dtype)
    stock.save_pretrained(tmp_path / "hf", max_shard_size="60KB" if not changes else "5GB")
    report = import_model(tmp_path / "hf", tmp_path / "start", max_shard_size="100KB")
    assert len(report["files"]) > 1
    start = read_start(tmp_path / "start")
    model = Transformer(start.model).double()
    model.load_state_dict(start_weights(start, model.config))
    ids = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(1))
    stock = LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        expected = stock.double()(ids).logits
        logits = model(ids).logits
    assert expected.abs().max() > 1
    # LLaMA's own norms round to float32.
    assert (logits[..., : expected.shape[-1]] - expected).abs().max() < 1e-5
    assert not logits[..., expected.shape[-1] :].any()
    section = yaml.safe_load((tmp_path / "start" / "model.yaml").read_text())
    assert section["model"] == start.model.model_dump(mode="json")
    assert section["init"] == str(tmp_path / "start")


def start_of(stock: LlamaForCausalLM, folder: Path) -> Path:
    stock.save_pretrained(folder / "hf")
    assert main(["import", str(folder / "hf"), "--out", str(folder / "start")]) == 0
    return folder / "start"


def run_from(start: Path, folder: Path, **sections: Any) -> Path:
    section = yaml.safe_load((start / "model.yaml").read_text())
    given: dict[str, Any] = {
        "preset": None,
        **section,
        "method": "vanilla",
        "data": {"sequence_length": LENGTH},
        # So small that no weight moves: what goes in must come out.
        "optimizer": {"lr": 1e-30, "weight_decay": 0.0},
        "training": {"steps": 2, "global_batch_size": 4, "validation_sequences": 16},
        "telemetry": {"enabled": False},
    }
    return runs.write_run(folder / "run.yaml", runs.write_data(folder / "data"), **given | sections)


@pytest.mark.launcher
def test_a_run_that_does_not_begin_with_the_imported_weights(tmp_path: Path) -> None:
    stock = llama()
    run = run_from(start_of(stock, tmp_path), tmp_path)
    runs.run_to_end(runs.single(run))
    (loss,) = [r["validation_loss"] for r in runs.metrics(tmp_path / "run") if len(r) == 2]
    tokens = open_token_set(tmp_path / "data" / "val")
    ids = torch.stack([torch.from_numpy(tokens.sequence(i, LENGTH)) for i in range(16)])
    with torch.no_grad():
        logits = stock(ids[:, :-1]).logits.double()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert expected > 6.3  # far from ln 384: no untrained model of ours has this loss
    assert abs(loss - expected) < 1e-5 * expected
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*/state.json")
    facts = json.loads(saved.read_text())  # what conversion holds a given tokenizer against
    assert facts["tokenizer_sha256"] == tokens.tokenizer_sha256
    assert facts["tokenizer_ids"] == tokens.vocab_size
    convert(tmp_path / "run", tmp_path / "out", dtype="fp32")
    weights, before = load_file(tmp_path / "out" / "model.safetensors"), stock.state_dict()
    assert weights.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(weights[name], tensor), name
    # Once saved, the run needs its start no more.
    (tmp_path / "start" / "state.json").unlink()
    runs.run_to_end(runs.single(run, "training.steps=2"))


@pytest.mark.launcher
@pytest.mark.parametrize("stage", [1, 2])
def test_a_bf16_run_begins_with_imported_weights_rounded_to_bf16(
    stage: int, tmp_path: Path
) -> None:
    stock = llama()
    values = json.loads(BF16.read_text())
    values["zero_optimization"]["stage"] = stage
    (tmp_path / "bf16.json").write_text(json.dumps(values))
    run = run_from(start_of(stock, tmp_path), tmp_path, deepspeed=str(tmp_path / "bf16.json"))
    runs.run_to_end(runs.launcher(run, 2))
    convert(tmp_path / "run", tmp_path / "out", dtype="fp32")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in stock.state_dict().items():
        assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize("trim_vocab", [False, True])
def test_rows_that_pad_the_vocabulary_become_ids_on_the_way_out_and_in(
    trim_vocab: bool, tmp_path: Path
) -> None:
    shape = ModelConfig(
        hidden_size=48, intermediate_size=80, num_layers=2, num_heads=4, vocab_size=300
    )
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(runs.word_tokenizer())
    model = Transformer(shape, seed=4)
    write_checkpoint(tmp_path / "run", model, tokenizer=tokenizer)
    exported = convert(tmp_path / "run", tmp_path / "hf", dtype="fp32", trim_vocab=trim_vocab)
    assert exported["padding_rows"] == exported["vocab_size"] - 300 == (0 if trim_vocab else 84)
    imported = import_model(tmp_path / "hf", tmp_path / "start")
    start = read_start(tmp_path / "start")
    assert start.model == shape
    assert imported["parameters"] == exported["parameters"] == parameter_count(shape)
    assert imported["padding_rows"] == 84
    again = Transformer(start.model)
    again.load_state_dict(start_weights(start, start.model))
    write_checkpoint(tmp_path / "next", again, tokenizer=tokenizer)
    returned = convert(tmp_path / "next", tmp_path / "hf2", dtype="fp32", trim_vocab=trim_vocab)
    same = ("parameters", "vocab_size", "padding_rows", "bytes", "files")
    assert [returned[key] for key in same] == [exported[key] for key in same]
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "hf2"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_vocabulary_that_does_not_fit_the_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama().save_pretrained(tmp_path / "hf")  # 384 rows
    file = tmp_path / "hf" / "tokenizer.json"

    def ids_of(name: str, given: int | None = None) -> int:
        start = tmp_path / name
        return int(import_model(tmp_path / "hf", start, vocab_size=given)["model"]["vocab_size"])

    assert ids_of("no tokenizer") == 384
    file.write_text("{}")
    assert ids_of("unreadable") == 384
    file.write_bytes(Tokenizer(WordLevel({"a": 0, "b": 255})).to_str().encode())
    assert ids_of("too small") == 384  # they would be padded to 256
    file.write_bytes(Tokenizer(WordLevel({"a": 0, "b": 256})).to_str().encode())
    assert ids_of("padded") == 257
    assert ids_of("given", 300) == 300
    for given, told in (
        ("256", "256 is less than the 257 ids of the folder's tokenizer"),
        ("385", "385 does not fit the model's 384 rows"),
    ):
        words = ["--out", str(tmp_path / "start"), "--vocab-size", given]
        assert main(["import", str(tmp_path / "hf"), *words]) == 2
        assert f"--vocab-size: {told}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda start: (start / "model.safetensors").unlink(), "model.safetensors: is missing"),
        (lambda start: (start / "manifest.json").unlink(), "manifest.json"),
        (lambda start: flip(start / "model.safetensors"), "differs from what was written"),
    ],
    ids=["file", "manifest", "bit"],
)
def test_a_damaged_start_that_is_trained_from(
    damage: Callable[[Path], None], told: str, tmp_path: Path
) -> None:
    start = start_of(llama(), tmp_path)
    damage(start)
    with pytest.raises(UserError, match=told):
        read_start(start)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


@pytest.mark.launcher
def test_a_start_of_another_shape_is_one_line(tmp_path: Path) -> None:
    run = run_from(start_of(llama(), tmp_path), tmp_path)
    output = runs.run_to_end(runs.single(run, "model.rope_theta=10000.0"), expect=2)
    lines = [line for line in output.splitlines() if line.startswith("sgt-ds train:")]
    (line,) = [line for line in lines if "warning:" not in line]
    assert "model.rope_theta: is 50000.0 in the import but 10000.0 in this run" in line


def test_init_at_something_else_is_not_told_from_a_damaged_start(tmp_path: Path) -> None:
    (tmp_path / "loops").mkdir()
    (tmp_path / "loops" / "config.json").write_text('{"model_type": "sgt"}')
    for name, made, told in (
        ("export", "export/model.safetensors", "is a transformers model"),
        ("loops", "loops/model.safetensors", "export with loops, .*; name .* as `fork`"),
        ("run", "run/checkpoints/step-00000002", "name one of them as `fork`"),
        ("other", "other/notes", "give a folder written by `sgt-ds import`"),
        ("nowhere", "elsewhere", "is not a folder"),
    ):
        (tmp_path / made).mkdir(parents=True)
        with pytest.raises(UserError, match=told) as refused:
            checked_start(tmp_path / name, PRESETS["demo"])
        assert str(refused.value).startswith(f"{tmp_path / name}: init: ")


def test_init_and_fork_together_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_from(start_of(llama(), tmp_path), tmp_path, fork=str(tmp_path))
    capsys.readouterr()
    assert main(["config", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "init: cannot be combined with fork" in line


def _bias(folder: Path, config: dict[str, Any]) -> None:
    config["attention_bias"] = True


def _long_positions(folder: Path, config: dict[str, Any]) -> None:
    """As configurations of transformers 4 say it."""
    config.pop("rope_parameters")
    config["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}


def _wide_heads(folder: Path, config: dict[str, Any]) -> None:
    config["head_dim"] = 16


def _relu(folder: Path, config: dict[str, Any]) -> None:
    config["hidden_act"] = "relu"


def _another_kind(folder: Path, config: dict[str, Any]) -> None:
    config["model_type"] = "mistral"


def _nameless(folder: Path, config: dict[str, Any]) -> None:
    config.clear()


def _loops(folder: Path, config: dict[str, Any]) -> None:
    config["model_type"] = "sgt"


def _quantized(folder: Path, config: dict[str, Any]) -> None:
    config["quantization_config"] = {"quant_method": "gptq"}


def _no_weights(folder: Path, config: dict[str, Any]) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _cut_file(folder: Path, config: dict[str, Any]) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def _changed(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[..., None]:
    def damage(folder: Path, config: dict[str, Any]) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


NORM, GATE = "model.norm.weight", "model.layers.1.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_bias, "attention_bias: is true"),
        (_long_positions, "rope_parameters: 'linear'"),
        (_wide_heads, "head_dim: 16 × 4"),
        (_relu, "hidden_act: 'relu'"),
        (_another_kind, "model_type: 'mistral' is not llama"),
        (_nameless, "model_type: is missing; give the folder of a LLaMA"),
        (_loops, "loops: would be lost"),
        (_quantized, "quantization_config"),
        (_no_weights, "only safetensors are read"),
        (_cut_file, "model.safetensors: cannot be read"),
        (_changed(lambda w: w.pop(NORM)), f"{NORM}: is missing"),
        (_changed(lambda w: w.update({GATE: w[GATE][:3].clone()})), f"{GATE}: is (3, 48)"),
        (
            _changed(lambda w: w.update({"model.bias": w[NORM].clone()})),
            "model.bias: has no counterpart",
        ),
        (_changed(lambda w: w[NORM].fill_(float("nan"))), "is not finite"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_trained_is_one_line_and_leaves_no_folder(
    damage: Callable[..., None], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hf"
    llama().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    damage(folder, config)
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "place").mkdir()
    capsys.readouterr()
    status = main(["import", str(folder), "--out", str(tmp_path / "place" / "start")])
    fault = capsys.readouterr().err.splitlines()
    assert status == 2
    assert len(fault) == 1
    assert told in fault[0]
    assert list((tmp_path / "place").iterdir()) == []
