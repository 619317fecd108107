"""Who may read an exporter, under which port, and what it tells of the other ranks."""

from __future__ import annotations

import base64
import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
import yaml
from pydantic import SecretStr, ValidationError

from sgt_ds.cli import main
from sgt_ds.config import PRESETS, RunConfig, TelemetryConfig, dump_run_config, load_run_config
from sgt_ds.errors import UserError
from sgt_ds.launch import Host, Target, check_launch, check_side_folders
from sgt_ds.telemetry import Exporter, own_target
from sgt_ds.training.telemetry import _write_targets

Start = Callable[..., Exporter]
SECRET = "correct horse battery"


def listening() -> socket.socket:
    """Somebody else's port."""
    other = socket.socket()
    other.bind(("127.0.0.1", 0))
    other.listen()
    return other


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Exporter] = []

    def start_one(**settings: Any) -> Exporter:
        with listening() as probe:
            port = probe.getsockname()[1]
        exporter = Exporter(
            TelemetryConfig(**{"port": port, **settings}),
            run_wide=True,
            local_rank=0,
            rank=0,
            info={"run": "r"},
            model=PRESETS["tiny"],
        )
        exporter.start()
        started.append(exporter)
        return exporter

    yield start_one
    for exporter in started:
        exporter.close()


def get(exporter: Exporter, path: str, name: str = "", password: str = "") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{exporter.port}{path}")
    if name:
        token = base64.b64encode(f"{name}:{password}".encode()).decode()
        request.add_header("Authorization", f"Basic {token}")
    with urllib.request.urlopen(request, timeout=5) as answer:
        return str(answer.read().decode())


def test_a_stranger_reads_what_needs_a_password(start: Start) -> None:
    exporter = start(username="prometheus", password=SecretStr(SECRET))
    assert "sgt_rank_step" in get(exporter, "/metrics", "prometheus", SECRET)
    for name, password in (("", ""), ("prometheus", "wrong"), ("somebody", SECRET)):
        for path in ("/metrics", "/targets", "/nothing"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                get(exporter, path, name, password)
    assert get(exporter, "/health") == "ok\n"
    odd = urllib.request.Request(f"http://127.0.0.1:{exporter.port}/metrics")
    odd.add_header("Authorization", "Basic \N{LATIN SMALL LETTER E WITH ACUTE}=")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(odd, timeout=5)


def test_a_changed_password_file_needs_a_restart(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("old\n")
    exporter = start(username="p", password_file=file)
    get(exporter, "/metrics", "p", "old")
    file.write_text("new\n")
    os.utime(file, (1, 1))  # another time than before, however coarse the clock
    get(exporter, "/metrics", "p", "new")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        get(exporter, "/metrics", "p", "old")
    # Half written, or gone: the password of before holds.
    file.write_text("\n")
    os.utime(file, (2, 2))
    get(exporter, "/metrics", "p", "new")
    file.unlink()
    get(exporter, "/metrics", "p", "new")


def test_a_password_that_is_none_serves_everybody(start: Start, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for given in (
        {"password": SecretStr("**********")},  # as run.yaml shows it
        {"password": SecretStr("")},
        {"password_file": tmp_path / "empty"},
        {"password_file": tmp_path / "absent"},
    ):
        with pytest.raises(UserError, match=r"telemetry\.password"):
            start(username="p", **given)
    for wrong in ({"username": "p"}, {"password": "x"}, {"username": "p", "password": "x"}):
        if wrong == {"username": "p", "password": "x"}:
            wrong = {**wrong, "password_file": "f"}
        with pytest.raises(ValidationError, match="one of password and password_file"):
            TelemetryConfig(**wrong)


def test_a_password_shows_in_run_yaml_or_in_the_served_page(
    start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig.model_validate(
        {
            "preset": "tiny",
            "data": {"train": [{"path": "shards"}]},
            "deepspeed": "ds.json",
            "run_dir": "runs/r",
            "telemetry": {"username": "p", "password": SECRET},
        }
    )
    text = dump_run_config(config)
    assert SECRET not in text + repr(config) + str(config.model_dump(mode="json"))
    assert yaml.safe_load(text)["telemetry"]["password"] == "**********"
    exporter = start(username="p", password=SecretStr(SECRET))
    assert SECRET not in get(exporter, "/metrics", "p", SECRET)
    # Nor where it is of the wrong type, or its section is.
    file = tmp_path / "run.yaml"
    for telemetry in (f"{{username: p, password: [{SECRET}]}}", f"[{SECRET}]"):
        lines = ("preset: tiny", "data: {train: [{path: s}]}", "deepspeed: d", "run_dir: r")
        file.write_text("\n".join([*lines, f"telemetry: {telemetry}"]))
        with pytest.raises(UserError, match="telemetry") as caught:
            load_run_config(file)
        assert SECRET not in str(caught.value)
    printed = capfd.readouterr()
    assert SECRET not in printed.out + printed.err


def test_a_taken_port_stops_a_run_that_may_take_the_next(start: Start) -> None:
    with listening() as other:
        taken = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {taken} is in use"):
            start(port=taken)
        exporter = start(port=taken, port_in_use="next")
        assert taken < exporter.port <= taken + 64
        get(exporter, "/metrics")


def test_the_launch_refuses_a_taken_port_that_the_exporter_would_go_around(tmp_path: Path) -> None:
    target = Target((Host("localhost", 1, 0),), None, local=True)
    with listening() as other:
        for choice in ("next", "error"):
            config = launched(tmp_path, port=other.getsockname()[1], port_in_use=choice)
            if choice == "next":
                check_launch(config, "run.yaml", target)
            else:
                with pytest.raises(UserError, match=r"telemetry\.port"):
                    check_launch(config, "run.yaml", target)


def test_ranks_on_other_hosts_are_given_asterisks_for_a_password(tmp_path: Path) -> None:
    """They read the resolved configuration; ranks of a local launch read the user's own."""
    host = Host("localhost", 1, 0)
    inline = launched(tmp_path, username="p", password=SECRET)
    check_launch(inline, "run.yaml", Target((host,), None, local=True))
    nodes = Target((host,), None, local=False, master_address="127.0.0.1", node_rank=0)
    with pytest.raises(UserError, match=r"telemetry\.password: .*use telemetry\.password_file"):
        check_launch(inline, "run.yaml", nodes)
    check_launch(launched(tmp_path, username="p", password_file="p"), "run.yaml", nodes)


def launched(folder: Path, **telemetry: Any) -> RunConfig:
    """A configuration that nothing is wrong with but what `telemetry` says."""
    values = yaml.safe_load(runs.write_run(folder / "run.yaml", folder).read_text())
    values["telemetry"] |= telemetry
    return RunConfig.model_validate(values)


def test_targets_are_written_nowhere_and_a_warning_is_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = Target((Host("localhost", 1, 0),), None, local=True)
    elsewhere = Target((Host("192.0.2.1", 1, 0), Host("localhost", 1, 1)), None, local=False)
    file = tmp_path / "file"
    file.touch()
    for folder, fault in (
        (file / "x", f"{file} is not a folder; choose a targets_dir other than {file / 'x'}"),
        (Path("/proc/x"), "/proc/x: nothing can be created in /proc"),
        (Path("/proc"), "/proc: nothing can be created in /proc"),
    ):
        config = launched(tmp_path, targets_dir=folder)
        with pytest.raises(UserError) as caught:
            check_side_folders(config, "run.yaml", here)
        assert str(caught.value).startswith(f"run.yaml: telemetry.targets_dir: {fault}")
        check_side_folders(config, "run.yaml", elsewhere)
        check_side_folders(launched(tmp_path, targets_dir=folder, enabled=False), "r", here)
    folder = tmp_path / "not" / "yet"
    config = launched(tmp_path, targets_dir=folder)
    check_side_folders(config, "run.yaml", here)
    assert not folder.parent.exists()
    config.run_dir.mkdir()
    _write_targets(config, [own_target("127.0.0.1", 9400, run="run", rank=0)])
    [target] = json.loads((folder / "run.json").read_text())
    assert target["targets"] == ["127.0.0.1:9400"]
    # A disk that fails later.
    _write_targets(launched(tmp_path, targets_dir=file), [])
    [told] = caplog.messages
    named = f"telemetry.targets_dir: {file / 'run.json'} cannot be written (Not a directory)"
    assert told.startswith(named)


def test_rank_0_does_not_tell_where_the_others_are(start: Start) -> None:
    exporter = start()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(exporter, "/targets")
    groups = [
        own_target("127.0.0.1", 9400, run="r", rank=0),
        own_target("0.0.0.0", 9401, run="r", rank=1),
        own_target("fe80::1", 9402, run="r", rank=2),
    ]
    exporter.serve_targets(groups)
    name = socket.gethostname()
    assert json.loads(get(exporter, "/targets")) == [
        {
            "targets": [where],
            "labels": {"run": "r", "host": name, "rank": rank, "__param_run": "r"},
        }
        for where, rank in (("127.0.0.1:9400", "0"), (f"{name}:9401", "1"), ("[fe80::1]:9402", "2"))
    ]


def test_targets_need_the_port_that_the_run_directory_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "night"
    run_dir.mkdir()
    values = {
        "preset": "tiny",
        "data": {"train": [{"path": "shards"}]},
        "deepspeed": "ds.json",
        "run_dir": str(run_dir),
        "telemetry": {"port": 12345},
    }
    (run_dir / "run.yaml").write_text(yaml.safe_dump(values))
    hostfile = tmp_path / "hosts"
    hostfile.write_text("node1 slots=2\n")
    for run, ports, port in (
        (str(run_dir), (), 12345),
        (str(run_dir), ("--port", "9500"), 9500),
        ("night", (), 9400),
    ):
        assert main(["monitor", "targets", str(hostfile), "--run", run, *ports]) == 0
        groups = json.loads(capsys.readouterr().out)
        assert [group["targets"] for group in groups] == [[f"node1:{port}"], [f"node1:{port + 1}"]]
        assert {group["labels"]["run"] for group in groups} == {"night"}
    out = tmp_path / "night.json"
    out.symlink_to(tmp_path / "linked.json")
    assert main(["monitor", "targets", str(hostfile), "--run", "night", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 2 targets of run night\n"
    assert json.loads((tmp_path / "linked.json").read_text()) == groups
    assert main(["monitor", "targets", str(tmp_path / "nope"), "--run", "night"]) == 2
    assert f"{tmp_path / 'nope'}: no such hostfile; check the path" in capsys.readouterr().err
