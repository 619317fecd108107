"""Checkpoints with a real DeepSpeed engine: whole or absent, verified, exact, at any world size."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_checkpoints import write_checkpoint

from sgt_ds.checkpoints import (
    list_checkpoints,
    load_payload,
    newest_good,
    read_latest,
    read_state,
    verify,
)
from sgt_ds.checkpoints.manifest import Manifest, read_manifest, record_of, write_manifest
from sgt_ds.cli import main
from sgt_ds.config import ModelConfig
from sgt_ds.errors import UserError
from sgt_ds.model import Transformer
from sgt_ds.ports import free_ports

WORKER = Path(__file__).parent / "checkpoint_worker.py"


def start(directory: Path, world_size: int, **settings: Any) -> list[subprocess.Popen[str]]:
    """Start the ranks of a run, without a launcher: quicker, and each exit status is seen."""
    port = free_ports()
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(directory), json.dumps(settings)],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]


def finish(ranks: list[subprocess.Popen[str]], expect: int = 0) -> list[dict[str, Any]]:
    """What the ranks printed, after all have ended as expected."""
    lines: list[dict[str, Any]] = []
    try:
        for process in ranks:
            out, err = process.communicate(timeout=240)
            assert process.returncode == expect, err[-3000:]
            lines += [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return lines


def run(directory: Path, world_size: int, **settings: Any) -> list[dict[str, Any]]:
    return finish(start(directory, world_size, **settings))


def losses(lines: list[dict[str, Any]]) -> dict[int, str]:
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def digests(lines: list[dict[str, Any]]) -> list[str]:
    return [line["digest"] for line in lines if "digest" in line]


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Twelve steps on two ranks, saved every third, two kept."""
    directory = tmp_path_factory.mktemp("whole") / "checkpoints"
    return directory, run(directory, 2, steps=12, every=3)


@pytest.fixture
def copy(whole: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> Path:
    """A copy of those checkpoints, to damage."""
    return Path(shutil.copytree(whole[0], tmp_path / "checkpoints"))


def test_the_last_ones_are_kept_and_the_pointer_names_the_newest(
    whole: tuple[Path, list[dict[str, Any]]],
) -> None:
    directory, _ = whole
    assert names_in(directory) == ["latest", "step-00000009", "step-00000012"]
    assert read_latest(directory) == "step-00000012"
    assert [verify(info.path) for info in list_checkpoints(directory)] == [[], []]
    state = read_state(directory / "step-00000012")
    assert (state["step"], state["world_size"], state["words"]) == (12, 2, ["für", 12])


def test_one_flipped_bit_in_any_file_is_found_and_named(copy: Path) -> None:
    checkpoint = copy / "step-00000012"
    names = names_in(checkpoint)
    assert len(names) == 7
    for name in names:
        path, draw = checkpoint / name, random.Random(name)
        content = path.read_bytes()
        for _ in range(5):
            damaged = bytearray(content)
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
            path.write_bytes(damaged)
            faults = verify(checkpoint)
            # A bit of the manifest can change what it says of another file.
            assert len(faults) == 1, faults
            assert name in faults[0] or name == "manifest.json"
        path.write_bytes(content)
        assert verify(checkpoint) == []


def test_missing_foreign_and_linked_files_are_named(copy: Path) -> None:
    checkpoint = copy / "step-00000012"
    (checkpoint / "note.txt").write_text("foreign")
    (checkpoint / "rng_rank_00000.safetensors").unlink()
    moved = checkpoint / "rng_rank_00001.safetensors"
    moved.rename(copy / "elsewhere")
    moved.symlink_to(copy / "elsewhere")
    faults = " ".join(verify(checkpoint))
    for name in ("note.txt", "rng_rank_00000.safetensors", "rng_rank_00001.safetensors"):
        assert name in faults


def test_a_damaged_newest_one_is_passed_over_and_the_resumed_run_is_bit_exact(
    copy: Path, whole: tuple[Path, list[dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    damaged = copy / "step-00000012" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = bytearray(damaged.read_bytes())
    content[-100] ^= 1
    damaged.write_bytes(content)
    found = newest_good(copy)
    assert found is not None
    assert found.step == 9
    assert damaged.name in caplog.text
    lines = run(copy, 2, steps=12, every=3, load="newest")
    expected = losses(whole[1])
    assert losses(lines) == {step: expected[step] for step in (10, 11, 12)}
    assert digests(lines)[-1] == digests(whole[1])[-1]
    assert verify(copy / "step-00000012") == []  # written anew


def test_none_good_is_an_error_and_no_new_start(copy: Path) -> None:
    for checkpoint in copy.glob("step-*"):
        (checkpoint / "manifest.json").unlink()
    finish(start(copy, 1, steps=12, every=3, load="newest"), expect=2)


def test_another_world_size_holds_the_same_numbers(
    copy: Path, whole: tuple[Path, list[dict[str, Any]]]
) -> None:
    saved = digests(whole[1])[-1]
    assert set(digests(run(copy, 1, steps=12, every=1, load="newest"))) == {saved}
    at_four = run(copy, 4, steps=13, every=1, load="newest")
    assert digests(at_four)[0] == saved
    back = run(copy, 2, steps=14, every=1, load="newest")
    assert digests(back)[0] == digests(at_four)[-1]
    assert [read_state(copy / f"step-000000{n}")["world_size"] for n in (13, 14)] == [4, 2]


def test_a_fork_takes_weights_and_optimizer_and_nothing_else(
    tmp_path: Path, whole: tuple[Path, list[dict[str, Any]]]
) -> None:
    lines = run(tmp_path / "new", 2, steps=0, every=1, fork=str(whole[0] / "step-00000012"))
    assert lines[0] == {"forked": 0, "digest": digests(whole[1])[-1]}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_fork_trains_with_the_optimizer_settings_of_its_parent(
    tmp_path: Path, stage: int
) -> None:
    run(tmp_path / "parent", 1, steps=1, every=1, stage=stage)
    lines = run(
        tmp_path / "fork",
        1,
        steps=0,
        every=1,
        stage=stage,
        fork=str(tmp_path / "parent" / "step-00000001"),
        decay=0.5,
        adam={"betas": [0.8, 0.99], "eps": 1e-6},
    )
    assert lines[1] == {"adam": [[1e-2, [0.8, 0.99], 1e-6, decay] for decay in (0.5, 0.0)]}


def test_a_checkpoint_of_another_precision_is_called_damaged(
    tmp_path: Path, whole: tuple[Path, list[dict[str, Any]]]
) -> None:
    saved = whole[0] / "step-00000012"
    [rank] = start(tmp_path, 1, steps=0, every=1, fork=str(saved), bf16=True)
    _, err = rank.communicate(timeout=240)
    assert rank.returncode == 2
    assert (
        f"{saved}: precision: was saved in fp32 and this run trains in bf16; use a DeepSpeed file "
        "with the same precision" in err
    )


def test_another_architecture_is_refused_with_its_first_difference(copy: Path) -> None:
    [rank] = start(copy, 1, steps=12, every=3, load="newest", width=38)
    _, err = rank.communicate(timeout=240)
    assert rank.returncode == 2
    assert "a different architecture: 0.weight is [37, 9] there" in err


def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_the_next_one_works(
    tmp_path: Path,
) -> None:
    lines = run(tmp_path, 2, steps=6, every=2, fail=[1, 4])
    failed = [line["failed"] for line in lines if "failed" in line]
    assert len(failed) == 2
    assert all("rank 1: " in text and "rank 0: " not in text for text in failed)
    assert [info.step for info in list_checkpoints(tmp_path)] == [6, 2]
    assert [verify(info.path) for info in list_checkpoints(tmp_path)] == [[], []]
    assert names_in(tmp_path) == ["latest", "step-00000002", "step-00000006"]


def test_a_kill_while_saving_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    for attempt in range(2):
        ranks = start(tmp_path, 2, steps=10**6, every=1, **({"load": "newest"} if attempt else {}))
        before = newest_step(tmp_path)
        try:
            wait_until(lambda before=before: newest_step(tmp_path) > before + 2)
            wait_until(lambda: any(tmp_path.glob(".step-*.partial")))
            time.sleep(random.Random(attempt).random() * 0.02)
        finally:
            for process in ranks:
                process.kill()
                process.communicate()
        found = list_checkpoints(tmp_path)
        assert 1 <= len(found) <= 3
        assert [verify(info.path) for info in found] == [[]] * len(found)
        assert read_latest(tmp_path) in {info.path.name for info in found}


def newest_step(directory: Path) -> int:
    steps = [int(path.name[5:]) for path in directory.glob("step-*")]
    return max(steps, default=0)


def wait_until(true: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.target}",))


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(
    copy: Path, tmp_path: Path, protocol: int
) -> None:
    checkpoint, mark = copy / "step-00000012", tmp_path / "ran"
    victim = checkpoint / "mp_rank_00_model_states.pt"
    with zipfile.ZipFile(victim) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    [pickled] = [name for name in entries if name.endswith("data.pkl")]
    entries[pickled] = pickle.dumps({"module": Bomb(mark)}, protocol=protocol)
    with zipfile.ZipFile(victim, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    with_hashes_to_match(checkpoint)
    [fault] = verify(checkpoint)
    assert victim.name in fault
    with pytest.raises(UserError):
        load_payload(victim)
    assert run(copy, 1, steps=9, every=3, load="newest")[0]["loaded"] == 9
    shutil.rmtree(copy / "step-00000009")
    assert newest_good(copy) is None
    assert not mark.exists()
    torch.load(victim, weights_only=False)  # the bomb is a real one
    assert mark.exists()


def with_hashes_to_match(checkpoint: Path) -> None:
    """A manifest as somebody would write it who wants the changed files to be taken."""
    manifest = read_manifest(checkpoint)
    files = {name: record_of(checkpoint / name) for name in manifest.files}
    write_manifest(
        checkpoint, Manifest(manifest.step, manifest.sequence, manifest.world_size, files)
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("state.json", "../../latest"),
        lambda text: text.replace("state.json", "/etc/passwd"),
        lambda text: text.replace('"step": 12', '"step": -1'),
        lambda text: text.replace('"step": 12', '"step": ' + "9" * 5000),
        lambda text: text.replace('"step": 12', '"step": ' + "[" * 100 + "]" * 100),
        lambda text: "[" * 100_000,
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"format": 1', '"format": 2'),
    ],
    ids=["dots", "root", "negative", "digits", "nested", "deep", "torn", "list", "format"],
)
def test_a_hostile_manifest_is_one_line_and_exit_2(
    copy: Path, change: Callable[[str], str]
) -> None:
    checkpoint = copy / "step-00000012"
    manifest = checkpoint / "manifest.json"
    manifest.write_text(change(manifest.read_text()))
    faults = verify(checkpoint)
    assert len(faults) == 1
    assert "\n" not in faults[0]
    assert len(faults[0]) < 1000
    [newest, older] = sorted(list_checkpoints(copy), key=lambda info: -info.step)
    assert newest.fault is not None
    assert older.fault is None


def test_a_fault_is_told_with_its_path_twice_or_without_a_remedy_or_with_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ModelConfig(
        num_layers=1, hidden_size=8, intermediate_size=16, num_heads=2, vocab_size=300
    )
    run, model = tmp_path / "run", Transformer(shape)
    older, newer = (write_checkpoint(run, model, step=step) for step in (3, 6))

    def told(*command: str) -> list[str]:
        capsys.readouterr()
        assert main([*command]) == 2
        lines = capsys.readouterr().err.splitlines()
        return [line.removeprefix("sgt-ds: ") for line in lines if line.startswith("sgt-ds: ")]

    convert = ("convert", str(run), "--out", str(tmp_path / "out"))
    weights = newer / "mp_rank_00_model_states.pt"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 4
    weights.write_bytes(content)
    fault = f"{newer}: {weights.name}: differs from what was written (xxh3 does not match); "
    verifies = f"`sgt-ds checkpoint verify {newer.parent}`"
    assert told("checkpoint", "verify", str(run)) == [f"{fault}use {older.name}"]
    assert told("checkpoint", "verify", str(newer)) == [
        f"{fault}use another one: {verifies} lists the good ones"
    ]
    assert told(*convert) == [f"{fault}use one that {verifies} reports as good"]
    for path in (older, newer):
        (path / "manifest.json").unlink()
    lacks = "manifest.json: is missing: not a complete checkpoint; "
    remedy = "; restore them from a copy, or retrain"
    assert told("checkpoint", "verify", str(run)) == [
        f"{path}: {lacks}none here is good{remedy}" for path in (newer, older)
    ]
    assert told(*convert) == [
        f"{newer}: {lacks}no other one here is complete{remedy.replace('them', 'it')}"
    ]
    assert [info.fault for info in list_checkpoints(newer.parent)] == [lacks.removesuffix("; ")] * 2


def test_verify_and_list_speak_json_and_exit_2_on_a_fault(copy: Path) -> None:
    (copy / "step-00000009" / "state.json").write_text("{}")
    command = [sys.executable, "-m", "sgt_ds", "checkpoint"]
    checked = subprocess.run(
        [*command, "verify", str(copy), "--json"], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr.count("\n")) == (2, 1)
    assert [entry["good"] for entry in json.loads(checked.stdout)] == [True, False]
    listed = subprocess.run(
        [*command, "list", str(copy), "--json"], capture_output=True, text=True, check=True
    )
    assert [entry["step"] for entry in json.loads(listed.stdout)] == [12, 9]
