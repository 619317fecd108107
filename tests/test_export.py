"""Conversion, held against the training model, DeepSpeed's own merge, and stock transformers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from export_run import MODEL, SCENARIOS, STEP, probe
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaForCausalLM

from sgt_ds.checkpoints.manifest import read_manifest, record_of, write_manifest
from sgt_ds.cli import main
from sgt_ds.errors import UserError
from sgt_ds.inference import convert
from sgt_ds.inference.source import find_checkpoint
from sgt_ds.inference.zero import MasterWeights
from sgt_ds.model import to_llama_names
from sgt_ds.ports import free_ports

SENTENCES = [
    f"{who} {did} the {what} in the {where}, because it was {why}."
    for who in ("Anna", "Tom", "The old fox")
    for did in ("found", "lost", "painted", "hid")
    for what in ("red boat", "map", "golden key", "naïve drawing")
    for where in ("river", "garden", "café")
    for why in ("cold", "late", "too dark to see")
]
PROBES = [*SENTENCES[::40], "  two  leading spaces", "tab\tand\nline", "emoji 😀 漢字", "½ ﬁ", ""]

STEP_FOLDER = f"checkpoints/step-{STEP:08d}"

# Runs where this package can't be imported, as on the machine of someone who only got the folder.
FRESH = """
import sys
sys.modules["sgt_ds"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
ids = torch.load(sys.argv[1])
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    again = folder + "-again"
    model.save_pretrained(again)
    copy = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    prompt = tokenizer("Anna found the", return_tensors="pt")
    text = tokenizer.decode(model.generate(**prompt, max_new_tokens=8, do_sample=False)[0])
    with torch.no_grad():
        answer = {"logits": model(ids).logits, "copy": copy(ids).logits}
    names = type(model).__name__, model.config.model_type, text
    torch.save({**answer, "names": names}, folder + ".answer")
"""


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("tokenizer") / "spm"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(prefix),
        vocab_size=MODEL.vocab_size,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
    )
    return prefix.with_suffix(".model")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, sentencepiece_file: Path) -> Path:
    """One folder a scenario, each a run directory with a checkpoint of two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    port = free_ports()
    shared = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    script = Path(__file__).parent / "export_run.py"
    logs = [(folder / f"rank{rank}.log").open("w+") for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder), str(sentencepiece_file)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            rank.wait(timeout=240)
    finally:
        for rank in ranks:
            rank.kill()
    for rank, log in zip(ranks, logs, strict=True):
        log.seek(0)
        assert rank.returncode == 0, log.read()[-4000:]
    return folder


@pytest.fixture(scope="module")
def exports(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every scenario in fp32, and what a fresh process made of it."""
    folder = tmp_path_factory.mktemp("exports")
    for name in SCENARIOS:
        convert(runs / name, folder / name, dtype="fp32", trim_vocab=name == "fixed")
    torch.save(probe(), folder / "ids.pt")
    environment = {**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            FRESH,
            str(folder / "ids.pt"),
            *(str(folder / n) for n in SCENARIOS),
        ],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "bf16"])
def test_export_computes_the_training_model_without_this_package(
    name: str, runs: Path, exports: Path
) -> None:
    answer = torch.load(exports / f"{name}.answer")
    expected = torch.load(runs / name / "logits.pt")[..., : answer["logits"].shape[-1]]
    scale = expected.abs().max()
    assert scale > 1  # far from an untrained model's near-constant answer
    assert (answer["logits"] - expected).abs().max() <= 1e-5 * scale
    torch.testing.assert_close(answer["copy"], answer["logits"], rtol=0, atol=0)
    kind, model_type, text = answer["names"]
    assert text.startswith("Anna found the")
    looping = name != "vanilla"
    assert model_type == ("sgt" if looping else "llama")
    assert kind == ("SgtForCausalLM" if looping else "LlamaForCausalLM")


def test_loops_matter_to_the_logits(runs: Path, exports: Path) -> None:
    """The comparison above could not tell a model that ignores its loops otherwise."""
    config = json.loads((exports / "fixed" / "config.json").read_text())
    assert config["loops"] == {
        layer: {"depth": 2, "heads": [1, 3], "scope": "attention"} for layer in ("2", "3")
    }
    weights = load_file(exports / "fixed" / "model.safetensors")
    expected = torch.load(runs / "fixed" / "logits.pt")
    plain = LlamaForCausalLM.from_pretrained(exports / "fixed", state_dict=None, loops=None)
    assert set(weights) == set(plain.state_dict())
    with torch.no_grad():
        logits = plain(probe()).logits
    assert (logits - expected[..., : logits.shape[-1]]).abs().max() > 0.1


def test_entry_window_exports_the_factors_of_its_step(exports: Path) -> None:
    """Step 6, entered at 4, window 8: falling 1 - 2/8; entered at 3 by ramp: 3/8 on the newest."""
    decay = json.loads((exports / "decay" / "config.json").read_text())["loops"]
    assert decay["1"]["heads"] == [0, 2]
    assert decay["1"]["scale"] == {"0": [1.0], "1": [0.75], "2": [1.0], "3": [0.75]}
    assert "scale" not in decay["3"]
    ramp = json.loads((exports / "ramp" / "config.json").read_text())["loops"]
    assert ramp["2"]["scale"] == {"0": [1.0, 0.375], "1": [1.0, 0.375]}
    narrowing = json.loads((exports / "ramp, narrowing" / "config.json").read_text())["loops"]
    assert narrowing["2"]["scale"] == {"0": [1.0] * 2, "1": [0.75] * 2, "3": [0.75] * 2}
    assert "while a loop was entering" in (exports / "decay" / "README.md").read_text()


def test_masters_not_the_rounded_weights_are_exported(runs: Path, exports: Path) -> None:
    """bf16, two groups, two ranks: bit for bit what DeepSpeed's own script merges."""
    merged = get_fp32_state_dict_from_zero_checkpoint(
        str(runs / "bf16" / "checkpoints"), tag=f"step-{STEP:08d}"
    )
    exported = load_file(exports / "bf16" / "model.safetensors")
    expected = to_llama_names(merged, MODEL)
    assert set(exported) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(exported[name], tensor), name
    rounded = expected["lm_head.weight"].bfloat16().float()
    assert not torch.equal(rounded, expected["lm_head.weight"])


@pytest.mark.parametrize("world_size", [4, 16])
def test_partitions_of_any_world_size_are_merged(
    world_size: int, runs: Path, tmp_path: Path
) -> None:
    """The two ranks' files cut again as more ranks would have written them."""
    two = runs / "bf16" / "checkpoints" / f"step-{STEP:08d}"
    shutil.copyfile(two / "mp_rank_00_model_states.pt", tmp_path / "mp_rank_00_model_states.pt")
    files = sorted(two.glob("*_optim_states.pt"))
    saved = [torch.load(file, weights_only=False) for file in files]
    key = "single_partition_of_fp32_groups"
    parts = zip(*(each["optimizer_state_dict"][key] for each in saved), strict=True)
    cut = []
    for whole in map(torch.cat, parts):
        size = -(-whole.numel() // (2 * world_size)) * 2
        # As DeepSpeed does, the padding of the last partition is left out of its file.
        cut.append([whole[rank * size : (rank + 1) * size].clone() for rank in range(world_size)])
    values = saved[0]
    values["optimizer_state_dict"]["partition_count"] = [world_size] * len(cut)
    for rank in range(world_size):
        values["optimizer_state_dict"][key] = [group[rank] for group in cut]
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save(values, tmp_path / name)
    reference, masters = MasterWeights(two), MasterWeights(tmp_path)
    assert masters.world_size == world_size
    assert masters.bit_sum() == reference.bit_sum()
    for name, shape in masters.shapes.items():
        count = torch.Size(shape).numel()
        assert torch.equal(masters.read(name, 0, count), reference.read(name, 0, count)), name


def test_shards_and_trimmed_rows_load_as_one_model(
    runs: Path, exports: Path, tmp_path: Path
) -> None:
    out = tmp_path / "small"
    report = convert(runs / "vanilla", out, dtype="bf16", max_shard_size="40KB", trim_vocab=True)
    assert len(report["files"]) > 3
    assert all((out / file).stat().st_size < 45_000 for file in report["files"])
    model, loading = LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(loading.values())
    whole = load_file(exports / "vanilla" / "model.safetensors")
    assert model.config.vocab_size == MODEL.vocab_size
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, whole[name][: tensor.shape[0]].bfloat16()), name
    assert whole["lm_head.weight"].shape[0] == MODEL.padded_vocab_size


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepiece_ids_survive_the_export(kind: str, runs: Path, tmp_path: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(tmp_path / "spm"),
        vocab_size=300,
        hard_vocab_limit=False,
        model_type=kind,
        byte_fallback=True,
        pad_id=3,
        add_dummy_prefix=kind == "unigram",
        minloglevel=2,
    )
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    run = _copy(runs / ("vanilla" if kind == "unigram" else "fixed"), tmp_path / "run")
    _restate(run / STEP_FOLDER, tokenizer=str(tmp_path / "spm.model"))
    convert(run, tmp_path / "out")
    exported = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=False)
    for text in PROBES:
        assert exported(text)["input_ids"] == original.encode(text), text
        assert exported.decode(original.encode(text)) == original.decode(original.encode(text))
    assert (exported.eos_token_id, exported.bos_token_id, exported.pad_token_id) == (2, 1, 3)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (2, 3)
    # llama.cpp's converter reads the model file and these; without them it adds a space and BOS.
    told = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (told["add_prefix_space"], told["add_bos_token"]) == (kind == "unigram", False)
    rows = range(original.get_piece_size(), MODEL.padded_vocab_size)
    assert generation["suppress_tokens"] == list(rows)


def test_huggingface_tokenizer_ids_survive_and_no_token_is_added(
    runs: Path, tmp_path: Path
) -> None:
    """As in training, which joins documents by the end token itself."""
    original = Tokenizer(models.BPE())
    original.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|padding|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    original.train_from_iterator(SENTENCES, trainer)
    (tmp_path / "set").mkdir()
    file = tmp_path / "set" / "tokenizer.json"
    original.save(str(file))
    # The prepared set says which id ends a document; names are only guessed without it.
    entry = {"file": file.name, "eos_id": 1, "bos_id": None, "pad_id": 0}
    (tmp_path / "set" / "manifest.json").write_text(json.dumps({"tokenizer": entry}))
    run = _copy(runs / "vanilla", tmp_path / "run")
    _restate(run / STEP_FOLDER, tokenizer=None)
    convert(run, tmp_path / "out", tokenizer=str(file))
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in PROBES:
        assert exported(text)["input_ids"] == original.encode(text).ids
    assert (exported.eos_token_id, exported.bos_token_id, exported.pad_token_id) == (1, None, 0)


def _copy(run: Path, copy: Path) -> Path:
    shutil.copytree(run, copy)
    return copy


def _restate(checkpoint: Path, **facts: Any) -> None:
    """A checkpoint that is whole and signed, with other facts."""
    file = checkpoint / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **facts}))
    manifest = read_manifest(checkpoint)
    files = {**manifest.files, file.name: record_of(file)}
    write_manifest(checkpoint, dataclasses.replace(manifest, files=files))


def _flip_a_bit(checkpoint: Path) -> None:
    victim = next(checkpoint.glob("*_optim_states.pt"))
    with victim.open("r+b") as stream:
        stream.seek(victim.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 4]))


def _lose_a_partition(checkpoint: Path) -> None:
    next(checkpoint.glob("*pp_rank_1_*")).unlink()


def _another_architecture(checkpoint: Path) -> None:
    """Whole and signed, but its state tells of a model with more layers."""
    model = json.loads((checkpoint / "state.json").read_text())["model"]
    _restate(checkpoint, model={**model, "num_layers": model["num_layers"] + 1})


@pytest.mark.parametrize(
    ("damage", "arguments", "told"),
    [
        (_flip_a_bit, [], "optim_states.pt: differs"),
        (_lose_a_partition, [], "pp_rank_1_mp_rank_00_optim_states.pt: is missing"),
        (_another_architecture, [], "does not match the architecture"),
        (None, ["--tag", "step-00000007"], "available: step-00000006"),
        (None, ["--tag", "../../vanilla"], "--tag"),
        (None, ["--max-shard-size", "big"], "--max-shard-size"),
        (None, ["--tokenizer", "no/such.model"], "tokenizer"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_folder(
    damage: object,
    arguments: list[str],
    told: str,
    runs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "decay", run)
    if callable(damage):
        damage(run / STEP_FOLDER)
    place = tmp_path / "place"
    place.mkdir()
    status = main(["convert", str(run), "--out", str(place / "out"), *arguments])
    *before, fault = capsys.readouterr().err.splitlines()
    assert status == 2
    assert told in fault
    # What only the whole, verified checkpoint shows comes after that progress line.
    assert [line.split(":")[0] for line in before] == ["verify"] * (damage is _another_architecture)
    assert list(place.iterdir()) == []


def test_a_checkpoint_is_not_found_by_its_own_name(runs: Path) -> None:
    checkpoint = runs / "decay" / STEP_FOLDER
    for given in (checkpoint, checkpoint.parent, runs / "decay"):
        for tag in (None, "6", checkpoint.name):
            assert find_checkpoint(given, tag) == checkpoint
    with pytest.raises(UserError, match="'7' is not a checkpoint here"):
        find_checkpoint(checkpoint, "7")


def _words(file: Path, size: int) -> str:
    words = Tokenizer(models.WordLevel({f"word{n}": n for n in range(size)}, unk_token="word0"))
    words.save(str(file))
    return str(file)


def test_another_tokenizer_than_the_models_is_exported_with_it(
    runs: Path, sentencepiece_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ids are other words: what the export then says is no text."""
    run, out = _copy(runs / "vanilla", tmp_path / "run"), tmp_path / "out"
    own, other = _words(tmp_path / "own.json", 300), _words(tmp_path / "other.json", 40)
    again = tmp_path / "again.json"  # the same in another layout
    again.write_text(json.dumps(json.loads(Path(own).read_text())))
    sha256 = hashlib.sha256(Path(own).read_bytes()).hexdigest()
    swapped = tmp_path / "swapped.json"
    text = Path(own).read_text().replace('"word7"', '"x"').replace('"word8"', '"word7"')
    swapped.write_text(text.replace('"x"', '"word8"'))
    fewer = f"{other}: tokenizer: has 40 ids, not 300"
    words = f"{swapped}: tokenizer: has 'word8' for id 7, not 'word7'"
    leave = "omit --tokenizer to use the run's own"
    copy = "pass a copy of that one to `sgt-ds convert --tokenizer`"
    gone = str(tmp_path / "gone.json")
    known = {"tokenizer_sha256": sha256, "tokenizer_ids": 300}
    for named, given, fault, remedy in (
        (own, other, fewer, leave),
        (own, str(swapped), words, leave),
        (gone, other, fewer, copy),
        (other, None, fewer, copy),
        (str(swapped), None, f"{swapped}: tokenizer: has other content", copy),
    ):
        _restate(run / STEP_FOLDER, tokenizer=named, **known)
        flag = [] if given is None else ["--tokenizer", given]
        told = f"sgt-ds: {fault}, unlike the one the model was trained with; {remedy}"
        assert main(["convert", str(run), "--out", str(out), *flag]) == 2
        assert capsys.readouterr().err == f"{told}\n"
        if given is None:
            assert main(["eval", "perplexity", str(run), own]) == 2
            assert capsys.readouterr().err.splitlines()[-1] == told
    # The last one: what an older version's checkpoint was trained with, nobody knows.
    unknown = dict.fromkeys(known)
    for named, given, facts in (
        (own, own, known),
        (own, str(again), known),
        (gone, str(again), known),
        (own, other, unknown),
    ):
        _restate(run / STEP_FOLDER, tokenizer=named, **facts)
        assert main(["convert", str(run), "--out", str(out), "--tokenizer", given]) == 0
        shutil.rmtree(out)


@pytest.mark.parametrize(
    ("limit", "tokenizer"),
    [(100_000, None), (10_000, "tokenizer.json"), (100_000, "tokenizer.json"), (100_000, "none")],
    ids=["a copied file", "what `tokenizers` writes", "weights after it", "weights alone"],
)
def test_full_disk_is_one_line_and_leaves_no_folder(
    limit: int,
    tokenizer: str | None,
    runs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = tmp_path / "place"
    run = runs / "vanilla"
    if tokenizer == "tokenizer.json":
        tokenizer = _words(tmp_path / tokenizer, 299)
        _restate(_copy(run, tmp_path / "run") / STEP_FOLDER, tokenizer=tokenizer)
        run = tmp_path / "run"
    command = ["convert", str(run), "--out", str(place / "out"), "--dtype", "fp32"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        status = main([*command, *(["--tokenizer", tokenizer] if tokenizer else [])])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert status == 2
    fault = capsys.readouterr().err.splitlines()[-1]
    assert "cannot be written (File too large); choose another --out" in fault
    assert list(place.iterdir()) == []
