"""What a person names: a checkpoint of another shape, a folder that is not there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import runs
from made_checkpoints import write_checkpoint
from token_sets import write_token_set

from sgt_ds.checkpoints import bytes_to_verify, read_state, verify
from sgt_ds.cli import main
from sgt_ds.config import PRESETS, load_run_config
from sgt_ds.launch import check_named_checkpoints
from sgt_ds.model import Transformer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tiny preset with one layer less than a run of it has."""
    shape = PRESETS["tiny"].model_copy(update={"num_layers": 5, "vocab_size": 511})
    return write_checkpoint(tmp_path_factory.mktemp("other"), Transformer(shape))


@pytest.mark.parametrize("key", ["fork", "resume"])
def test_a_checkpoint_of_another_shape_is_found_out_by_the_ranks(
    tmp_path: Path, checkpoint: Path, capfd: Any, key: str
) -> None:
    data = runs.write_data(tmp_path / "data")
    file = runs.write_run(
        tmp_path / "run.yaml", data, telemetry={"enabled": False}, **{key: str(checkpoint)}
    )
    assert main(["train", str(file)]) == 2
    assert capfd.readouterr().err == (
        f"sgt-ds: {file}: model.num_layers: is 6, but 5 in {checkpoint}; set 5, or name another "
        "checkpoint\n"
    )
    assert not (tmp_path / "run" / "logs").exists()


@pytest.mark.parametrize("key", ["fork", "resume"])
def test_a_run_named_as_a_checkpoint_is_told_without_the_key(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    file = runs.write_run(
        tmp_path / "run.yaml", runs.write_data(tmp_path / "data"), telemetry={"enabled": False}
    )
    saved = tmp_path / "other" / "checkpoints" / "step-00000004"
    saved.mkdir(parents=True)
    for path, fault in (
        (tmp_path / "other", f"is a run directory; name one checkpoint in it, e.g. {saved}"),
        (saved.parent, f"is the folder of checkpoints; name one checkpoint in it, e.g. {saved}"),
        (saved, "holds no state.json, so it is not a checkpoint; give one of a run, "),
    ):
        assert main(["train", str(file), f"{key}={path}"]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"sgt-ds: command line: {key}: {path} {fault}")
    # What a run began from may be gone once it has checkpoints of its own.
    config = load_run_config(file, [f"{key}={tmp_path / 'gone'}"])
    shutil.copytree(checkpoint, config.run_dir / "checkpoints" / "step-00000006")
    check_named_checkpoints(config, str(file))


def test_a_fork_with_nothing_left_to_train_is_found_out_at_its_end(
    tmp_path: Path, capfd: Any
) -> None:
    parent = write_checkpoint(tmp_path / "parent", Transformer(PRESETS["tiny"]))
    step = read_state(parent)["step"]
    file = runs.write_run(
        tmp_path / "run.yaml",
        runs.write_data(tmp_path / "data"),
        telemetry={"enabled": False},
        training={"steps": step},
        fork=str(parent),
    )
    assert main(["train", str(file)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"sgt-ds: {file}: training.steps: {step} is not above the fork's step")
    assert not (tmp_path / "run" / "logs").exists()


def test_another_precision_passes_for_a_missing_file(tmp_path: Path) -> None:
    data = runs.write_data(tmp_path / "data")
    file = runs.write_run(
        tmp_path / "run.yaml",
        data,
        telemetry={"enabled": False},
        training={"steps": 2},
        checkpoint={"every": 1, "keep_last": 9},
    )
    runs.run_to_end(runs.single(file))
    saved = tmp_path / "run" / "checkpoints"
    shutil.rmtree(saved / "step-00000002")
    bf16 = Path(__file__).parents[1] / "ds_configs" / "zero2_bf16_cpu.json"
    said = runs.run_to_end(runs.single(file, f"deepspeed={bf16}"), expect=2)
    assert said.splitlines()[-1] == (
        f"sgt-ds train: {saved / 'step-00000001'}: precision: was saved in fp32 and this run "
        "trains in bf16; use a DeepSpeed file with the same precision"
    )


def test_verification_reads_other_bytes_than_it_promised(checkpoint: Path) -> None:
    read = 0

    def count(size: int) -> None:
        nonlocal read
        read += size

    assert verify(checkpoint, count) == []
    assert read == bytes_to_verify(checkpoint) > 100_000


@pytest.mark.parametrize(
    "command",
    [["checkpoint", "list"], ["checkpoint", "verify"], ["convert", "--out", "export"], ["stop"]],
    ids=" ".join,
)
def test_a_name_of_nothing_is_told_without_what_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command, "NOPE"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("sgt-ds: NOPE: no such ")
    assert "; give " in line


@pytest.mark.parametrize(
    "command",
    [["checkpoint", "list"], ["checkpoint", "verify"], ["convert", "--out", "export"], ["stop"]],
    ids=" ".join,
)
def test_a_folder_of_something_else_passes_for_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "control").mkdir()
    (tmp_path / "docs" / "control" / "faults.md").touch()
    assert main([*command, "docs"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("sgt-ds: docs: holds n")
    # A run that has saved nothing yet is one.
    (tmp_path / "run" / "control" / "ranks").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints").mkdir()
    assert main(["checkpoint", "list", "run/checkpoints"]) == 0


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("data.validation=nowhere", "nowhere: data.validation: does not exist"),
        ("data.train=[{path: nowhere}]", "nowhere: data.train.0.path: does not exist"),
        ("resume=nowhere", "command line: resume: nowhere is not a checkpoint directory"),
        ("method=sgd", "command line: method: 'sgd' is unknown"),
        ("growth.k_mx=3", "command line: growth.k_mx: unknown key"),
        ("data.train=[{paht: x}]", "command line: data.train.0.paht: unknown key"),
    ],
)
def test_what_an_override_names_is_told_of_the_file_or_of_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, override: str, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    data = runs.write_data(tmp_path / "data")
    file = runs.write_run(tmp_path / "run.yaml", data, telemetry={"enabled": False})
    assert main(["train", str(file), override]) == 2
    [told] = capsys.readouterr().err.splitlines()
    assert told.startswith(f"sgt-ds: {line}")


@pytest.mark.launcher
def test_a_checkpoint_elsewhere_goes_on_without_its_history_or_over_another_run(
    tmp_path: Path,
) -> None:
    data = runs.write_data(tmp_path / "data")
    file = runs.write_run(tmp_path / "run.yaml", data, telemetry={"enabled": False})
    runs.run_to_end(runs.single(file))
    run, moved = tmp_path / "run", tmp_path / "moved"
    middle = run / "checkpoints" / "step-00000012"
    runs.run_to_end(runs.single(file, f"resume={middle}", f"run_dir={moved}"))
    assert runs.losses(moved) == runs.losses(run)
    assert runs.journal_lines(moved) == runs.journal_lines(run)
    runs.check_replay(moved)

    def refused(*words: str) -> str:
        output = runs.run_to_end(runs.single(file, *words), expect=2)
        [line] = [line for line in output.splitlines() if line.startswith("sgt-ds train:")]
        return line

    fresh = f"run_dir={tmp_path / 'fresh'}"
    told = refused(f"resume={middle}", fresh, "growth.k_max=1")
    assert f"{middle}: growth.k_max: 2 -> 1: resume continues the same run" in told
    assert not (tmp_path / "fresh").exists()
    assert "is followed by step-00000020" in refused(f"resume={middle}")
    # A start that is refused because of its data leaves what is told of the run as it was.
    before = (run / "run.yaml").read_bytes()
    swapped = (f"data.train=[{{path: {data / 'val'}}}]", f"data.validation={data / 'train'}")
    assert "is not what this run reads" in refused(*swapped)
    assert (run / "run.yaml").read_bytes() == before
    # With checkpoints of its own the moved run goes on from those, and has nothing left to do.
    assert "complete" in runs.run_to_end(runs.single(file, f"resume={middle}", f"run_dir={moved}"))


def test_a_validation_set_of_another_tokenizer_is_told_as_a_vocabulary(
    tmp_path: Path, capsys: Any
) -> None:
    data = runs.write_data(tmp_path / "data")
    other = tmp_path / "other"
    shard = runs.markov_text(4_000, 3)
    write_token_set(other, [shard], vocab_size=99_999, tokenizer=runs.word_tokenizer() + b" ")
    file = runs.write_run(
        tmp_path / "run.yaml", data, data={"validation": str(other)}, telemetry={"enabled": False}
    )
    assert main(["train", str(file)]) == 2
    [told] = capsys.readouterr().err.splitlines()
    assert told.startswith(f"sgt-ds: {other}: data.validation: was prepared with another tokenizer")
