"""Checkpoints as somebody would make them who wants harm: each is one line, exit 2, and no more."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from forked import Nursery
from safetensors.numpy import load_file, save_file

from sgt_ds import train
from sgt_ds.checkpoints import list_checkpoints, newest_good, read_latest, verify
from sgt_ds.checkpoints.manifest import Manifest, read_manifest, record_of, write_manifest
from sgt_ds.checkpoints.rng import load_rng
from sgt_ds.cli import main
from sgt_ds.errors import UserError

LAST = "step-00000004"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Path:
    """A run of four updates on two ranks, saved after the second and the last."""
    root = tmp_path_factory.mktemp("made")
    file = runs.write_run(
        root / "run.yaml",
        runs.write_data(root / "data"),
        training={"steps": 4, "validate_every": 99},
        checkpoint={"every": 2},
        telemetry={"enabled": False},
    )
    nursery.start(root / "log", [file], ranks=2).end()
    return file


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of it, to damage."""
    shutil.copytree(made.with_suffix(""), tmp_path / "run")
    file = tmp_path / "run.yaml"
    file.write_text(made.read_text().replace(str(made.with_suffix("")), str(tmp_path / "run")))
    return file


def checkpoint_of(run: Path) -> Path:
    return run.with_suffix("") / "checkpoints" / LAST


def seal(folder: Path) -> None:
    """Make the manifest agree with the files as they are now."""
    manifest = read_manifest(folder)
    files = {name: record_of(folder / name) for name in manifest.files}
    write_manifest(folder, Manifest(manifest.step, manifest.sequence, manifest.world_size, files))


def change_state(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    state = json.loads((folder / "state.json").read_text())
    change(state)
    (folder / "state.json").write_text(json.dumps(state))
    seal(folder)


def refused(run: Path, nursery: Nursery, ranks: int = 1) -> str:
    """What a start that resumes says: one line, exit status 2, no traceback."""
    log = run.with_suffix(".log")
    command = [run, f"resume={checkpoint_of(run)}"]
    said = nursery.start(log, command, ranks=ranks).end(expect=2)
    assert "Traceback" not in said
    lines = [line for line in said.splitlines() if line.startswith("sgt-ds train:")]
    [line] = [line for line in lines if "warning:" not in line]  # of a run as short as this one
    assert LAST in line
    assert len(line) < 1000
    return line


DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"a": ' * 100 + "1" + "}" * 100, "nested"),
        (DEEP, "nested"),
        ('{"step": ' + "9" * 5000 + "}", "digits"),
        ('{"step": 1e999, "world_size": 2}', "step"),
        ('{"step": 4, "world_size": 1000000000000}', "world_size"),
        ('{"step": true, "world_size": 2}', "step"),
        ('{"step": -4, "world_size": 2}', "step"),
        ("[]", "object"),
        ("", "JSON"),
        ("\ufeff{}", "JSON"),
    ],
    ids=["100", "100000", "digits", "inf", "ranks", "bool", "negative", "list", "empty", "bom"],
)
def test_a_state_that_is_none_is_loaded_or_takes_the_reader_down(
    run: Path, text: str, word: str
) -> None:
    folder = checkpoint_of(run)
    (folder / "state.json").write_text(text)
    seal(folder)
    faults = verify(folder)
    assert faults
    assert all("\n" not in fault and len(fault) < 500 for fault in faults)
    assert word in faults[0]
    good = newest_good(folder.parent)
    assert good is not None
    assert good.step == 2


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_link(target: str) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        path.unlink()
        path.symlink_to(target)

    return act


@pytest.mark.parametrize(
    "act",
    [
        make_pipe,
        make_link("/dev/zero"),
        make_link("/etc/passwd"),
        make_link("nowhere"),
        make_link("."),
    ],
    ids=["pipe", "endless", "outside", "nowhere", "folder"],
)
@pytest.mark.parametrize(
    "name",
    ["manifest.json", "state.json", "rng_rank_00000.safetensors", "mp_rank_00_model_states.pt"],
)
def test_a_link_or_a_pipe_is_followed_or_waited_for(
    run: Path, name: str, act: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint_of(run)
    act(folder / name)
    assert main(["checkpoint", "verify", str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert name in said
    good = newest_good(folder.parent)
    assert good is not None
    assert good.step == 2


@pytest.mark.parametrize(
    "act",
    [
        make_pipe,
        make_link("/dev/zero"),
        lambda path: path.write_text("../../elsewhere\n"),
        lambda path: path.write_text("step-00000099\n"),
        lambda path: path.write_bytes(b"\xff" * 99),
        lambda path: path.write_text("step-00000004" + " " * 10_000_000),
    ],
    ids=["pipe", "endless", "dots", "unknown", "binary", "long"],
)
def test_the_pointer_leads_a_reader_away(
    run: Path, act: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = checkpoint_of(run).parent
    act(directory / "latest")
    assert read_latest(directory) in (None, "step-00000099", LAST)
    assert [info.step for info in list_checkpoints(directory)] == [4, 2]
    good = newest_good(directory)
    assert good is not None
    assert good.step == 4
    status = main(["checkpoint", "verify", str(directory)])
    said = capsys.readouterr().err
    assert (status, "latest: does not name a checkpoint" in said) in ((2, True), (0, False))
    assert (status == 0) == (read_latest(directory) == LAST)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("growth"),
        lambda state: state.update(batches=10**30),
        lambda state: state["growth"].update(state=[[[]]]),
    ],
    ids=["missing", "huge", "nested"],
)
def test_a_state_of_other_values_is_a_traceback(
    run: Path, nursery: Nursery, change: Callable[[dict[str, Any]], None]
) -> None:
    change_state(checkpoint_of(run), change)
    assert verify(checkpoint_of(run)) == []
    assert "state.json" in refused(run, nursery)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, scalars: tensors.pop("numpy"),
        lambda tensors, scalars: tensors.update(torch_cpu=tensors["torch_cpu"][:7].copy()),
        lambda tensors, scalars: scalars.update(numpy=["MT19937", 10**40, 0, 0.0]),
        lambda tensors, scalars: scalars.update(python=[3, [[[]]]]),
        lambda tensors, scalars: scalars.update(python={}),
    ],
    ids=["missing", "short", "huge", "nested", "object"],
)
def test_a_random_state_of_other_values_is_a_traceback(
    run: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]
) -> None:
    file = checkpoint_of(run) / "rng_rank_00000.safetensors"
    header = file.read_bytes()
    size = int.from_bytes(header[:8], "little")
    scalars = json.loads(json.loads(header[8 : 8 + size])["__metadata__"]["scalars"])
    tensors = load_file(file)
    change(tensors, scalars)
    save_file(tensors, file, metadata={"scalars": json.dumps(scalars)})
    with pytest.raises(UserError, match=file.name) as refusal:
        load_rng(file)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "name", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"]
)
def test_tensor_files_of_other_contents_are_a_traceback_or_a_hang(
    run: Path, nursery: Nursery, name: str
) -> None:
    """Two ranks, of which one finds nothing wrong: it must not wait for the other."""
    file = checkpoint_of(run) / name
    torch.save({"module": {"x": torch.zeros(3)}, "optimizer_state_dict": {}}, file)
    seal(checkpoint_of(run))
    assert verify(checkpoint_of(run)) == []
    assert "DeepSpeed" in refused(run, nursery, ranks=2)


def test_a_run_file_or_control_file_nested_without_end_is_a_traceback(
    run: Path, nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = run.with_suffix("")
    (run_dir / "control").mkdir(exist_ok=True)
    (run_dir / "control" / "counters.json").write_text(DEEP)
    with (run_dir / "metrics.jsonl").open("a") as stream:
        stream.write(DEEP + "\n")
    said = nursery.start(run.with_suffix(".log"), [run, "telemetry.enabled=true"]).end()
    assert "counters.json not readable" in said
    assert sorted(runs.losses(run_dir)) == [1, 2, 3, 4]
    for text in (DEEP, "[" * 100_000, "a: &a [*a, *a]\n", "step: " + "9" * 5000):
        (run_dir / "run.yaml").write_text(text)
        assert train.main([str(run)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_an_error_of_another_process_arrives_as_it_was_raised() -> None:
    error = UserError(Path("run.yaml"), None, "is wrong; fix it", everywhere=True)
    arrived = pickle.loads(pickle.dumps(error))
    assert (str(arrived), vars(arrived)) == (str(error), vars(error))
