"""TensorBoard and Weights & Biases, the real packages, and what happens where they fail."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs

from sgt_ds.config import WandbConfig, load_run_config
from sgt_ds.errors import UserError
from sgt_ds.launch import Host, Target, check_launch
from sgt_ds.telemetry import Tracker, tensorboard, wandb
from sgt_ds.telemetry.example import full_snapshot
from sgt_ds.telemetry.snapshot import Snapshot
from sgt_ds.telemetry.trackers import MAX_WAITING, plotted

WAIT = "sgt_ds.telemetry.trackers.WAIT_AT_END_SECONDS"
SNAPSHOT = full_snapshot(4, 2, run_wide=True, host_wide=True)


class Broken:
    """A writer that fails, or hangs until it is let go."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act

    def write(self, step: int, values: dict[str, float]) -> None:
        self._act()

    def close(self) -> None:
        """Nothing is open."""


def test_tensorboard_lacks_a_value_that_was_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WAIT, 120.0)
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator
    for _ in range(2):  # a resumed run goes on in the same folder
        tracker = tensorboard(tmp_path)
        tracker.put(SNAPSHOT)
        tracker.close()
    events = accumulator(str(tmp_path))
    events.Reload()
    values = plotted(SNAPSHOT)
    assert set(events.Tags()["tensors"]) == set(values)
    assert {"sgt_loss", "sgt_loop_depth/layer=3", "sgt_growth_phase/phase=growing"} <= set(values)
    [event, *_] = events.Tensors("sgt_loss")
    assert event.step == SNAPSHOT.step
    assert event.tensor_proto.float_val[0] == pytest.approx(values["sgt_loss"])
    assert not any(name.startswith(("sgt_rank", "sgt_host", "sgt_gpu")) for name in values)


def test_wandb_offline_keeps_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setattr(WAIT, 120.0)  # its service starts slowly on a busy machine
    settings = WandbConfig(project="p", mode="offline")
    for _ in range(2):
        tracker = wandb(settings, tmp_path, run="r", config={"seed": 0})
        tracker.put(SNAPSHOT)
        tracker.close()
    files = list(tmp_path.rglob("*.wandb"))
    name = (tmp_path / "run-id").read_text().strip()
    assert [file.name for file in files] == [f"run-{name}.wandb"] * 2
    assert all(b"sgt_layer_entropy_ratio/layer=3" in file.read_bytes() for file in files)


def test_a_writer_that_fails_stops_the_run(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise OSError("no space left")

    caplog.set_level(logging.ERROR, logger="sgt_ds")
    tracker = Tracker("tensorboard", lambda: Broken(fail))
    for _ in range(3):
        tracker.put(SNAPSHOT)
    tracker.close()
    assert [record.getMessage() for record in caplog.records] == [
        "telemetry: tensorboard failed; training continues without it: no space left"
    ]


def test_a_writer_that_hangs_holds_training_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WAIT, 0.2)
    let_go = threading.Event()
    tracker = Tracker("wandb", lambda: Broken(let_go.wait))
    snapshots: list[Snapshot] = [SNAPSHOT] * (MAX_WAITING + 5)
    for snapshot in snapshots:
        tracker.put(snapshot)
    tracker.close()
    assert [r.getMessage() for r in caplog.records].count(
        "telemetry: wandb is too slow; rows are lost (logged once)"
    ) == 1
    let_go.set()


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_found_by_a_rank_after_the_launch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = runs.write_run(
        tmp_path / "run.yaml",
        tmp_path,
        telemetry={"tensorboard": name == "tensorboard"}
        | ({"wandb": {"project": "p"}} if name == "wandb" else {}),
    )
    config = load_run_config(file)
    here = Target((Host("localhost", 1, 0),), None, local=True)
    elsewhere = Target((Host("192.0.2.1", 1, 0), *here.hosts), None, local=False)
    telemetry = config.telemetry
    open_it = {
        "tensorboard": lambda: tensorboard(tmp_path),
        "wandb": lambda: wandb(telemetry.wandb, tmp_path, run="r", config={}),
    }[name]
    # W&B leaves a folder of its name in the working directory, which Python would import.
    (tmp_path / name).mkdir()
    monkeypatch.delitem(sys.modules, name, raising=False)
    ours = [path for path in sys.path if "-packages" not in path]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *ours])
    told = []
    for look in (lambda: check_launch(config, "run.yaml", here), open_it):
        with pytest.raises(UserError) as caught:
            look()
        told.append(str(caught.value))
    remedy = f"pip install 'sgt-ds[{name}]' or disable it"
    assert told == [f"this environment: telemetry.{name}: No module named '{name}'; {remedy}"] * 2
    assert not elsewhere.has_first_rank  # the packages of that host count


def test_a_missing_package_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"telemetry\.tensorboard: .*sgt-ds\[tensorboard\]"):
        tensorboard(tmp_path)
    with pytest.raises(UserError, match=r"telemetry\.wandb: .*sgt-ds\[wandb\]"):
        wandb(WandbConfig(project="p"), tmp_path, run="r", config={})
    assert list(tmp_path.iterdir()) == []
