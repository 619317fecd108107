"""RUN.yaml, overrides and the DeepSpeed JSON: what is refused, and with which line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import runs
import yaml

from sgt_ds import train
from sgt_ds.cli import main
from sgt_ds.config import (
    PRESETS,
    RunConfig,
    RunLayout,
    check_only_run,
    check_run_directory,
    config_differences,
    config_hash,
    dump_run_config,
    load_run_config,
    prepare_run_directory,
    resolve_deepspeed,
    save_run_config,
    start_warnings,
    told_local_size,
    told_rank,
    told_world_size,
)
from sgt_ds.config.suggestions import OTHER_NAMES
from sgt_ds.errors import UserError
from sgt_ds.flops import parameter_count

RUN = {
    "preset": "573m",
    "data": {"train": [{"path": "shards"}], "sequence_length": 4096},
    "training": {"global_batch_size": 1024, "micro_batch_size": 8},
    "deepspeed": "ds.json",
    "run_dir": "runs/a",
}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN))
    return path


def deepspeed_file(tmp_path: Path, **values: object) -> str:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, **values}))
    return f"deepspeed={path}"


def test_presets_have_the_paper_s_sizes() -> None:
    # Paper, table of model configurations: 275M, 573M, 1.2B.
    sizes = {name: round(parameter_count(PRESETS[name]) / 1e6) for name in ("275m", "573m", "1.2b")}
    assert sizes == {"275m": 275, "573m": 573, "1.2b": 1211}


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("growth.k_mx=2", "growth.k_mx: unknown key; did you mean 'k_max'?"),
        ("optimiser.lr=1", "optimiser: unknown key; did you mean 'optimizer'?"),
        (
            "data.train=[{path: a, wieght: 2}]",
            "data.train.0.wieght: unknown key; did you mean 'weight'?",
        ),
        ("growth.heads=20", "growth.heads: 20 exceeds the model's 16; set 16 or fewer"),
        ("growth.layers=16", "growth.layers: 16 exceeds the 15 eligible layers; set 15 or fewer"),
        ("growth.k_max=0", "growth.k_max: must be above 0 (got 0); correct it"),
        (
            "growth.layers={from_jurnal: x}",
            "growth.layers.from_jurnal: unknown key; did you mean 'from_journal'?",
        ),
        ("growth.layers={from_journal: x}", "growth.layers: lacks step, top; add them"),
        ("growth.layers={from_journal: x, top: 1}", "growth.layers.step: is missing; add it"),
        (
            "data.train.0.path=mine/train",
            "data.train.0.path: 'train' is a list; give all of it, e.g. "
            "data.train=[{path: mine/train}]",
        ),
        (
            "data.train.0.weight=2",
            "data.train.0.weight: 'train' is a list; give all of it, e.g. "
            "data.train=[{path: …, weight: 2}]",
        ),
        (
            "data.train=mine/train",
            "data.train: must be a list, e.g. [{path: mine/train}] (got 'mine/train'); correct it",
        ),
        ("growth.exclude_layers=0", "growth.exclude_layers: must be a list, e.g. [0] (got 0)"),
        ("optimizer.betas=0.9", "optimizer.betas: must be a list, e.g. [0.9, 0.95] (got 0.9)"),
        ("growth=3", "growth: is a section, not a value; set keys in it: k_max, layers"),
        ("data.train=[x]", "data.train.0: is a section, not a value; set keys in it: path,"),
        ("run_dir=", "run_dir: is empty; give a value"),
        ("run_dir=3", "run_dir: must be a path; quote it if it looks like a number (got 3)"),
        ("preset=537m", "preset: '537m' is unknown; did you mean '573m'?"),
        ("preset=573", "preset: '573' is unknown; did you mean '573m'?"),
        ("telemetry.port=http", "telemetry.port: must be a whole number, e.g. 9400 (got 'http')"),
        (
            "telemetry.port=''",
            "telemetry.port: must be a whole number, e.g. 9400 (got ''); correct it",
        ),
        ("training.steps=1e3", "training.steps: must be a whole number, e.g. "),
        ("optimizer.lr=x", "optimizer.lr: must be a number, e.g. 0.0006 (got 'x'); correct it"),
        ("data.document_mask=3", "data.document_mask: must be true or false (got 3); correct it"),
        (
            "growth.direction=D2S",
            "growth.direction: must be 'd2s' or 's2d' (got 'D2S'); did you mean 'd2s'?",
        ),
        (
            "telemetry.wandb=true",
            "telemetry.wandb: is true, which is not a valid value for this key; give its keys, "
            "e.g. {project:",
        ),
        ("training.steps=true", "training.steps: is true, which is not a valid value for this key"),
        ("optimizer.lr=.inf", "optimizer.lr: must be a finite number (got inf)"),
        ("preset=[1]", "preset: '[1]' is unknown"),
        ("run_dir=''", "run_dir: is the current directory"),
        (
            "validate_every=1",
            "validate_every: unknown key; did you mean 'training.validate_every'?",
        ),
        ("model.layers=4", "model.layers: unknown key; did you mean 'num_layers'?"),
        ("model.heads=4", "model.heads: unknown key; did you mean 'num_heads'?"),
        ("model.d_model=64", "model.d_model: unknown key; did you mean 'hidden_size'?"),
        ("model.preset=demo", "model.preset: unknown key; did you mean 'preset' at the top level"),
        ("checkpoint.interval=9", "checkpoint.interval: unknown key; did you mean 'every'?"),
        (
            "precision=bf16",
            "precision: unknown key; that is set in the DeepSpeed file named by `deepspeed`: bf16:",
        ),
        ("model.hidden_size=100", "model: hidden_size 100 must be a multiple of 2 × num_heads"),
        ("method=block_loop", "growth.layers: method block_loop takes a list of layers"),
    ],
)
def test_a_mistake_is_one_line_that_names_file_key_and_remedy(
    run_file: Path, override: str, line: str
) -> None:
    with pytest.raises(UserError) as error:
        load_run_config(run_file, [override])
    assert str(error.value).startswith(f"command line: {line}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "preset: [",
        "- a\n- b\n",
        "preset: 573m\npreset: 275m\n",
        "a: " + "[" * 5000,
        "\x00",
        "? {a: b}\n: c",
    ],
)
def test_broken_yaml_is_refused_without_a_traceback(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError):
        load_run_config(path)


def test_a_deepspeed_file_is_told_to_lack_a_preset(tmp_path: Path) -> None:
    file = Path("ds_configs/zero2_bf16.json")
    with pytest.raises(UserError) as caught:
        load_run_config(file)
    told = "is a DeepSpeed file (it has bf16, zero_optimization); give a RUN.yaml whose `deepspeed`"
    assert str(caught.value) == f"{file}: {told} names it"
    run = tmp_path / "run.yaml"
    run.write_text("data: {}\nzero_optimization: {}\n")
    with pytest.raises(UserError, match="preset: is missing"):
        load_run_config(run)


def test_a_comma_in_a_number_is_told_as_a_key_of_the_wrong_type(run_file: Path) -> None:
    other = yaml.safe_dump({key: value for key, value in RUN.items() if key != "training"})
    run_file.write_text(f"{other}training: {{steps: 5,035, global_batch_size: 8}}\n")
    with pytest.raises(UserError, match=r"training: 29 is not a key; in {…}, write 5035 rather"):
        load_run_config(run_file)


def test_the_saved_configuration_reads_back_as_the_same_run(run_file: Path, tmp_path: Path) -> None:
    config = load_run_config(
        run_file, ["growth.k_max=2", "model.vocab_size=1000", "optimizer.lr=6e-4"]
    )
    saved = tmp_path / "saved.yaml"
    saved.write_text(dump_run_config(config))
    again = load_run_config(saved)
    assert again == config
    assert config_hash(again) == config_hash(config)


def test_a_model_of_another_shape_is_not_called_by_the_preset(run_file: Path) -> None:
    whole = "model={hidden_size: 64, intermediate_size: 128, num_layers: 4, num_heads: 4, vocab_size: 512}"
    assert load_run_config(run_file, [whole, "growth.layers=2"]).preset is None
    same = load_run_config(run_file, ["model.vocab_size=1000", "model.num_layers=16"])
    assert same.preset == "573m"
    assert "preset: null" in dump_run_config(load_run_config(run_file, ["model.num_layers=8"]))


def test_keys_that_are_missing_are_told_together(run_file: Path) -> None:
    run = {**RUN, "model": {"num_layers": 4, "num_heads": 4}}
    del run["preset"]
    run_file.write_text(yaml.safe_dump(run))
    with pytest.raises(UserError) as caught:
        load_run_config(run_file)
    told = "model: lacks hidden_size, intermediate_size, vocab_size; add them"
    assert str(caught.value) == f"{run_file}: {told}"
    run_file.write_text("preset: tiny\n")
    with pytest.raises(UserError, match=r"run\.yaml: lacks data, deepspeed, run_dir; add them"):
        load_run_config(run_file)


def test_other_names_lead_to_keys_that_are_there() -> None:
    sections = {name: info.annotation for name, info in RunConfig.model_fields.items()}
    for name, others in OTHER_NAMES.items():
        known = set(sections[name].model_fields)  # type: ignore[union-attr]
        assert set(others.values()) <= known
        assert not set(others) & known


def test_identity_ignores_what_may_change_between_resumes(run_file: Path) -> None:
    config = load_run_config(run_file)
    moved = load_run_config(run_file, ["training.micro_batch_size=4", "telemetry.port=1234"])
    other = load_run_config(run_file, ["growth.k_max=1"])
    assert config_differences(config, moved) == []
    assert config_differences(config, other) == ["growth.k_max: 3 -> 1"]
    assert config_hash(config) == config_hash(moved) != config_hash(other)


def test_a_contradiction_between_yaml_and_json_names_both_places(
    run_file: Path, tmp_path: Path
) -> None:
    config = load_run_config(run_file, [deepspeed_file(tmp_path, gradient_clipping=0.5)])
    with pytest.raises(UserError) as error:
        resolve_deepspeed(config, 2, run_file)
    assert "ds.json: gradient_clipping: 0.5 contradicts" in str(error.value)
    assert f"{run_file}: optimizer.clip" in str(error.value)


def test_json_may_repeat_what_yaml_says(run_file: Path, tmp_path: Path) -> None:
    override = deepspeed_file(
        tmp_path, gradient_clipping=1.0, train_micro_batch_size_per_gpu="auto"
    )
    values = resolve_deepspeed(load_run_config(run_file, [override]), 4, run_file)
    assert values["gradient_accumulation_steps"] == 1024 // (8 * 4)


def test_bf16_gradients_are_checked_and_added_up_in_fp32(run_file: Path, tmp_path: Path) -> None:
    config = load_run_config(run_file, [deepspeed_file(tmp_path, bf16={"enabled": True})])
    values = resolve_deepspeed(config, 1, run_file)
    assert values["bf16"]["check_grad_overflow"] is True
    assert values["data_types"]["grad_accum_dtype"] == "fp32"


@pytest.mark.parametrize(
    ("said", "on"),
    [
        ({}, False),
        ({"timers": {}}, False),
        ({"timers": {"throughput": {"synchronized": True}}}, False),
        ({"timers": {"throughput": {"enabled": True}}}, True),
    ],
)
def test_a_timer_that_stops_the_device_is_on_unasked(
    run_file: Path, tmp_path: Path, said: dict[str, object], on: bool
) -> None:
    config = load_run_config(run_file, [deepspeed_file(tmp_path, **said)])
    assert resolve_deepspeed(config, 2, run_file)["timers"]["throughput"]["enabled"] is on


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer"),
        ({"fp16": {"enabled": True}}, "fp16.enabled"),
        ({"bf16": True}, "bf16"),
        (
            {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}},
            "zero_optimization.stage",
        ),
        ({"train_batch_size": 512}, "train_batch_size"),
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation"),
        ({"bfloat16": {"enabled": True}}, "bfloat16"),
        ({"fp8": {"enabled": True}}, "fp8"),
        ({"bf16": {"enabled": "no"}}, "bf16.enabled"),
        ({"timers": None}, "timers"),
        ({"timers": {"throughput": 5}}, "timers.throughput"),
        ({"timers": {"throughput": {"enabled": "perhaps"}}}, "timers.throughput"),
        ({"communication_data_type": "fp99"}, "communication_data_type"),
        ({"data_types": {"grad_accum_dtype": "nonsense"}}, "data_types.grad_accum_dtype"),
        ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype"),
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor"),
        ({"gradient_predivide_factor": 2}, "gradient_predivide_factor"),
        ({"prescale_gradients": True}, "prescale_gradients"),
        ({"offload_optimizer": {"device": "cpu"}}, "offload_optimizer"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer",
        ),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage"),
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "zero_optimization.overlap_com"),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": 0}},
            "zero_optimization.reduce_bucket_size",
        ),
        (
            {"zero_optimization": {"stage": 2, "compute_grad_norm": False}},
            "zero_optimization.compute_grad_norm",
        ),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "bf16.bf16_master_weights_and_grads",
        ),
        ({"steps_per_prin": 5}, "steps_per_prin"),
    ],
)
def test_deepspeed_files_that_cannot_work_are_refused(
    run_file: Path, tmp_path: Path, values: dict[str, object], key: str
) -> None:
    config = load_run_config(run_file, [deepspeed_file(tmp_path, **values)])
    with pytest.raises(UserError) as error:
        resolve_deepspeed(config, 2, run_file)
    assert error.value.field == key


@pytest.mark.parametrize(
    ("values", "meant"),
    [
        ({"comunication_data_type": "fp32"}, "'communication_data_type'?"),
        ({"offload_optimizer": {"device": "cpu"}}, "'zero_optimization.offload_optimizer'?"),
        ({"zero_optimization": {"stage": 2, "prescale_gradients": True}}, "at the top level"),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, "'grad_accum_dtype'?"),
    ],
)
def test_a_misspelled_key_of_deepspeed_is_told_without_the_one_that_was_meant(
    run_file: Path, tmp_path: Path, values: dict[str, object], meant: str
) -> None:
    config = load_run_config(run_file, [deepspeed_file(tmp_path, **values)])
    with pytest.raises(UserError, match=re.escape(meant)):
        resolve_deepspeed(config, 2, run_file)


def test_a_deepspeed_file_that_is_missing_or_broken_is_printed_as_fine(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"bf16": ')
    for path, fault in ((tmp_path / "nope.json", "no such"), (broken, "is not valid JSON")):
        assert main(["config", str(run_file), f"deepspeed={path}"]) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert fault in told.err


def test_what_deepspeed_takes_is_refused(run_file: Path, tmp_path: Path) -> None:
    taken: dict[str, object] = {
        "zero_optimization": {
            **{"stage": 2, "reduce_bucket_size": 2e8, "overlap_comm": "auto"},
            **{"offload_optimizer": {"device": "cpu"}, "stage3_max_live_parameters": 10},
            "reduce_scatter": False,
        },
        "zero_force_ds_cpu_optimizer": False,
        "gradient_predivide_factor": 2,
        "prescale_gradients": True,
        "communication_data_type": "FP32",
        "data_types": {"grad_accum_dtype": "bfloat16", "param_dtype": None},
        "flops_profiler": {"enabled": False},
        "steps_per_print": None,
    }
    config = load_run_config(run_file, [deepspeed_file(tmp_path, **taken)])
    values = resolve_deepspeed(config, 2, run_file)
    for key in taken:
        if key != "steps_per_print":
            assert values[key] == taken[key]


def test_a_batch_that_does_not_divide_names_sizes_that_do(run_file: Path, tmp_path: Path) -> None:
    config = load_run_config(
        run_file,
        [deepspeed_file(tmp_path), "training.global_batch_size=24", "training.micro_batch_size=5"],
    )
    with pytest.raises(
        UserError, match=r"set training.micro_batch_size to one of \[1, 2, 3, 4, 6, 12\]"
    ) as told:
        resolve_deepspeed(config, 2, run_file)
    assert told.value.message.endswith(", or for a new run, set it to 20 or 30")


def test_a_host_too_many_is_told_with_the_numbers_of_ranks_that_fit(
    run_file: Path, tmp_path: Path
) -> None:
    batch = ["training.global_batch_size=96", "training.micro_batch_size=2"]
    config = load_run_config(run_file, [deepspeed_file(tmp_path), *batch])
    with pytest.raises(UserError, match=r"; train on 3, 4, 6, 8, 12, 16 ranks, or "):
        resolve_deepspeed(config, 10, run_file)


@pytest.mark.parametrize(
    "override", ["growth.k_max=2026-99-99", "growth.k_max={[1]: 2}", "growth.k_max=["]
)
def test_an_override_that_is_no_yaml_is_refused(run_file: Path, override: str) -> None:
    with pytest.raises(UserError, match=r"growth\.k_max: value is not valid YAML"):
        load_run_config(run_file, [override])


def test_a_refused_start_leaves_the_directory_free_for_the_corrected_one(
    run_file: Path, tmp_path: Path
) -> None:
    refused, corrected = (
        load_run_config(run_file, [f"run_dir={tmp_path / 'run'}", f"training.seed={seed}"])
        for seed in (0, 1)
    )
    prepare_run_directory(refused, resuming=False)
    assert check_run_directory(corrected) is False
    RunLayout(refused.run_dir).metrics.write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"training\.seed: 0 -> 1: run_dir holds another run"):
        check_run_directory(corrected)
    assert check_run_directory(refused) is True
    longer = refused.training.model_copy(update={"steps": refused.training.steps + 1})
    with pytest.raises(UserError, match=r"training\.steps: .* cosine .* with `fork: .*step-…`"):
        check_run_directory(refused.model_copy(update={"training": longer}))


def test_checkpoints_without_a_run_yaml_are_trained_over(run_file: Path, tmp_path: Path) -> None:
    config = load_run_config(run_file, [f"run_dir={tmp_path / 'run'}"])
    prepare_run_directory(config, resuming=False)
    layout = RunLayout(config.run_dir)
    for step in (20, 100):
        (layout.checkpoints / f"step-{step:08}").mkdir()
    assert check_run_directory(config) is True
    layout.config.unlink()
    with pytest.raises(UserError, match=r"run\.yaml: is missing, .*resume: .*step-00000100`"):
        check_run_directory(config)


def test_a_start_that_comes_too_late_is_ignored_without_a_word(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    there = [f"run_dir={tmp_path / 'run'}"]
    begun = load_run_config(run_file, [*there, "init=old"])
    prepare_run_directory(begun, resuming=False)
    other = load_run_config(run_file, [*there, f"init={tmp_path / 'new'}"])
    assert start_warnings(other) == []  # nothing is saved yet: it is what the run begins with
    (RunLayout(begun.run_dir).checkpoints / "step-00000020").mkdir()
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    for start in (
        f"init={tmp_path / 'old'}",
        "init=../old",
        f"resume={there[0][8:]}/checkpoints/x",
    ):
        assert start_warnings(load_run_config(run_file, [*there, start])) == []
    checkpoint = tmp_path / "other" / "checkpoints" / "step-00000007"
    for start in ("init=old", f"fork={checkpoint}", f"resume={checkpoint}"):
        late = load_run_config(run_file, [*there, start])
        for _ in range(2):  # what was ignored once is not what the run began with
            assert check_run_directory(late)
            (told,) = start_warnings(late)
            key, _, path = start.partition("=")
            assert told.startswith(f"{key}: {path} is ignored")
            save_run_config(late)
        assert start_warnings(load_run_config(run_file, [*there, "init=../old"])) == []
    once = load_run_config(run_file, [*there, "resume=never"])
    save_run_config(once)
    save_run_config(load_run_config(run_file, there))
    saved = load_run_config(RunLayout(begun.run_dir).config)
    assert (saved.resume, saved.init) == ("auto", tmp_path / "old")


@pytest.mark.parametrize("value", ["loop", "a\0b"])
def test_a_path_that_no_system_takes_is_a_traceback(
    value: str, run_file: Path, tmp_path: Path
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    path = str(loop) if value == "loop" else value
    for key in ("init", "data.validation", "run_dir"):
        with pytest.raises(UserError, match=rf"{key}: .*(link that leads back|NUL|null byte)"):
            load_run_config(run_file, [f"{key}={json.dumps(path)}"])


def test_a_folder_of_something_else_is_trained_into(run_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = load_run_config(run_file, [f"run_dir={run_dir}"])
    check_only_run(config, run_file)
    run_dir.mkdir()
    for folder in ("logs/rank", "conf", "cache", "tensorboard"):
        (run_dir / folder).mkdir(parents=True)
    for name in (
        "slurm-7.out",
        ".hidden",
        "logs/rank/1.log",
        "conf/mine.yaml",
        "hosts",
        "cache/it",
    ):
        (run_dir / name).touch()
    cached = load_run_config(
        run_file, [f"run_dir={run_dir}", f"training.compile_cache={run_dir / 'cache'}"]
    )
    mine, hosts = run_dir / "conf" / "mine.yaml", run_dir / "hosts"
    check_only_run(cached, mine, hosts)
    with pytest.raises(UserError, match="run_dir: holds cache and 1 more, which is not part"):
        check_only_run(config, mine)
    shutil.rmtree(run_dir / "cache")
    (run_dir / "control").mkdir()
    for name in ("README.md", "growth.jsonl", "run.yaml", "control/valve.c"):
        (run_dir / name).touch()
        told = name.partition("/")[0]
        with pytest.raises(UserError, match=f"run_dir: holds {told}, which is not part"):
            check_only_run(config, run_dir / "run.yaml", mine, hosts)
        (run_dir / name).unlink()
    # A start that was cut off makes it a run's own, whatever else comes to lie there.
    prepare_run_directory(config, resuming=False)
    (run_dir / "README.md").touch()
    check_only_run(config, run_file)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("telemetry.password=hunter2", "command line: telemetry: username goes together"),
        ("growth=3", "command line: growth: is a section"),
        ("preset=273m", "command line: preset: "),
        (
            'telemetry.password="hunter2',
            "command line: telemetry.password: value is not valid YAML",
        ),
    ],
)
def test_a_fault_of_the_command_line_is_told_of_the_file(
    run_file: Path, override: str, told: str
) -> None:
    with pytest.raises(UserError) as caught:
        load_run_config(run_file, [override])
    assert str(caught.value).startswith(told)
    assert "hunter2" not in str(caught.value)
    run_file.write_text(run_file.read_text() + "\nnosuch: 1\n")
    if "YAML" not in told:
        with pytest.raises(UserError, match=re.escape(str(run_file))):
            load_run_config(run_file, [override])


def test_what_overrides_have_to_do_with_a_fault_of_the_file_is_left_out(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["training.micro_batch_size=7", deepspeed_file(tmp_path)]
    assert main(["plan", str(run_file), *given, "--world-size", "3"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sgt-ds: {run_file}: training.global_batch_size: ")
    assert " is not a multiple of training.micro_batch_size 7 × 3 ranks; " in line
    assert line.endswith(" (the command line sets training.micro_batch_size)")
    assert main(["plan", str(run_file), given[1], "--world-size", "7"]) == 2
    assert "command line" not in capsys.readouterr().err


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command ends with, in status 2."""
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    told = capsys.readouterr().err
    assert (status, told.count("\n")) == (2, 1)
    return told


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["trian"], "'trian' is unknown; did you mean 'train'?; known: config, tokenizer,"),
        (["growth", "shwo", "run"], "'shwo' is unknown; did you mean 'show'?; known: replay,"),
        (["convert", "run", "--out", "x", "--dtype", "FP32"], "'FP32' is unknown; did you mean"),
        (["convert", "run", "--out", "x", "--trim-vocba"], "did you mean '--trim-vocab'?"),
        (["train", "run.yaml", "--num-gpu", "2"], "did you mean '--num-gpus'?"),
        (["plan", "--method", "SGT"], "'SGT' is unknown; did you mean 'sgt'?; known: vanilla,"),
        (["plan", "--preset", "573"], "'573' is unknown; did you mean '573m'?; known: tiny,"),
    ],
)
def test_a_mistyped_word_is_told_without_the_one_that_was_meant(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert meant in refused(arguments, capsys)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["eval", "tasks", "x", "--tasks", "sciq", "--tasks", "mmlu"], "--tasks: is given twice; "),
        (["convert", "x", "--out", "a", "--out=b"], "--out: is given twice; give it once"),
        (["report", "x", "-o", "a", "--out", "b"], "-o/--out: is given twice; give it once"),
        (["plan", "--compile", "--no-compile"], "--compile/--no-compile: is given twice; "),
        (
            ["growth", "replay", "x", "--ema", "0", "--entropy-ema", "0.5"],
            "--entropy-ema: sets the same as --ema; give one of them",
        ),
        (["config", "x", "seed=1", "seed=2"], "override seed: is given twice; give it once"),
        (["plan", "x", "seed=1", "--steps", "9", "seed=2"], "override seed: is given twice; "),
        (
            ["config", "x", "growth.k_max=2", "growth={layers: 2}"],
            "override growth: replaces growth.k_max, given before; give one of them",
        ),
        (
            ["train", "x", "deepspeed=a.json", "--deepspeed_config", "b.json"],
            "--deepspeed_config: conflicts with deepspeed=a.json, which sets the same key; ",
        ),
    ],
)
def test_of_what_is_given_twice_only_the_last_counts(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(arguments, capsys)


def test_what_loses_nothing_is_refused_as_given_twice(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [deepspeed_file(tmp_path), "growth={}", "growth.heads=1"]
    assert main(["config", str(run_file), "--json", "--json", *overrides]) == 0
    assert json.loads(capsys.readouterr().out)["growth"]["heads"] == 1


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "x"}, "RANK: 'x' is not a whole number of 0 or more"),
        ({"OMPI_COMM_WORLD_RANK": "-1"}, "OMPI_COMM_WORLD_RANK: '-1' is not"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE: is not set, though this process has a rank"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE: '0' is not a whole number of 1 or more"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "LOCAL_RANK: is not set, though RANK is"),
        ({"LOCAL_SIZE": "two"}, "LOCAL_SIZE: 'two' is not"),
    ],
)
def test_a_variable_of_a_launcher_that_is_none_of_its_numbers_is_a_traceback(
    variables: dict[str, str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # joining sets them
    assert (told_rank(), told_world_size(), told_local_size()) == (None, 1, 1), "empty is unset"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert train.main([str(runs.write_run(tmp_path / "run.yaml", tmp_path))]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if line.startswith(f"sgt-ds train: environment: {said}")]
