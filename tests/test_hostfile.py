"""Hostfiles: what DeepSpeed would misread is refused with its line, what it reads right passes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import runs

from sgt_ds import train
from sgt_ds.cli import main
from sgt_ds.errors import UserError
from sgt_ds.launch import (
    RUN_ID_VARIABLE,
    Host,
    Launch,
    format_hostfile,
    forwarded_environment,
    forwarding_warnings,
    parse_hostfile,
    probe,
    processes,
    read_environment_file,
)
from sgt_ds.launch.ssh import Answer, ask

REFUSED = {
    "empty": (b"", None),
    "comments_only": (b"# worker-1 slots=8\n\n", None),
    "zero_slots": (b"a slots=2\nb slots=0\n", "line 2"),
    "zero_slots_long": (b"a slots=000\n", "line 1"),
    "letters_behind_digits": (b"a slots=8x\n", "line 1"),
    "spaces_around_equals": (b"a slots = 8\n", "line 1"),
    "space_behind_equals": (b"a slots= 8\n", "line 1"),
    "no_slots": (b"a\n", "line 1"),
    "no_host": (b"slots=8\n", "line 1"),
    "negative": (b"a slots=-8\n", "line 1"),
    "plus": (b"a slots=+8\n", "line 1"),
    "other_digits": ("a slots=٨\n".encode(), "line 1"),
    "huge": (b"a slots=99999999999999999999\n", "line 1"),
    "huge_text": (b"a slots=" + b"9" * 10000 + b"\n", "line 1"),
    "just_too_many": (b"a slots=1025\n", "line 1"),
    "duplicate": (b"a slots=2\nb slots=2\na slots=4\n", "line 3"),
    "duplicate_other_case": (b"node slots=2\nNODE slots=2\n", "line 2"),
    "duplicate_trailing_dot": (b"node slots=2\nnode. slots=2\n", "line 2"),
    "byte_order_mark": (b"\xef\xbb\xbfa slots=2\n", "line 1"),
    "utf16": ("a slots=2\n".encode("utf-16"), "line 1"),
    "latin1": (b"f\xfcr slots=2\n", "line 1"),
    "umlaut": ("für slots=2\n".encode(), "line 1"),
    "ipv6": (b"fe80::1 slots=2\n", "line 1"),
    "ipv6_brackets": (b"[::1] slots=2\n", "line 1"),
    "port": (b"a:22 slots=2\n", "line 1"),
    "bad_ipv4": (b"10.0.0.256 slots=2\n", "line 1"),
    "bad_ipv4_first": (b"256.1.1.1 slots=2\n", "line 1"),
    "short_ipv4": (b"10.0.1 slots=2\n", "line 1"),
    "option": (b"-oProxyCommand=touch slots=2\n", "line 1"),
    "command": (b"a;reboot slots=2\n", "line 1"),
    "substitution": (b"$(reboot) slots=2\n", "line 1"),
    "backtick": (b"`reboot` slots=2\n", "line 1"),
    "pipe": (b"a|b slots=2\n", "line 1"),
    "quote": (b'"a" slots=2\n', "line 1"),
    "range": (b"node[1-4] slots=2\n", "line 1"),
    "list": (b"a,b slots=2\n", "line 1"),
    "user": (b"root@a slots=2\n", "line 1"),
    "nul": (b"a\0b slots=2\n", "line 1"),
    "escape": (b"a\x1b[31m slots=2\n", "line 1"),
    "lone_carriage_return": (b"a slots=2\rb slots=2\n", "line 1"),
    "long_label": (b"a" * 64 + b" slots=2\n", "line 1"),
    "long_name": (b"a." * 130 + b"a slots=2\n", "line 1"),
    "more_behind": (b"a slots=2 max_slots=4\n", "line 1"),
    "localhost_among_others": (b"a slots=2\nlocalhost slots=2\n", "line 2"),
    "loopback_among_others": (b"127.0.1.1 slots=2\na slots=2\n", "line 1"),
    "no_break_space": ("a\u00a0slots=2\n".encode(), "line 1"),
}

ACCEPTED = {
    "plain": (b"worker-1 slots=8\nworker-2 slots=4\n", [("worker-1", 8), ("worker-2", 4)]),
    "no_newline_at_end": (b"a slots=1", [("a", 1)]),
    "comments_and_blanks": (b"# head\n\n  \na slots=2   # first\n", [("a", 2)]),
    "tabs": (b"\ta\t\tslots=2\t\n", [("a", 2)]),
    "crlf": (b"a slots=2\r\nb slots=2\r\n", [("a", 2), ("b", 2)]),
    "ipv4": (b"10.0.0.1 slots=2\n10.0.0.2 slots=2\n", [("10.0.0.1", 2), ("10.0.0.2", 2)]),
    "underscore": (b"gpu_node-1.example.org slots=2\n", [("gpu_node-1.example.org", 2)]),
    "localhost_alone": (b"localhost slots=2\n", [("localhost", 2)]),
    "leading_zero": (b"a slots=08\n", [("a", 8)]),
    "most": (b"a slots=1024\n", [("a", 1024)]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_misread_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    text, field = REFUSED[name]
    path = tmp_path / "hosts"
    path.write_bytes(text)
    with pytest.raises(UserError) as refused:
        parse_hostfile(path)
    assert refused.value.field == field
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_accepted_means_the_same_to_deepspeed(name: str, tmp_path: Path) -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    text, expected = ACCEPTED[name]
    path = tmp_path / "hosts"
    path.write_bytes(text)
    hosts = parse_hostfile(path)
    assert [(host.name, host.slots) for host in hosts] == expected
    # Both the user's own file and the plain one that a launch writes.
    assert list(fetch_hostfile(str(path)).items()) == expected
    path.write_text(format_hostfile(hosts))
    assert list(fetch_hostfile(str(path)).items()) == expected


def test_missing_hostfile_does_not_train_on_one_node(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(UserError):
            parse_hostfile(path)


def test_check_prints_one_line_or_one_document(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    command = [sys.executable, "-m", "sgt_ds", "hostfile", "check", str(path), "--json"]
    path.write_text("a slots=2\nb slots=8x\n")
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert f"{path}: line 2: " in refused.stderr
    path.write_text("a slots=2\nb slots=8\n")
    passed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(passed.stdout)["world_size"] == 10


def test_one_host_that_is_this_machine_is_probed_by_ssh_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No ssh is needed to train on it."""
    monkeypatch.setenv("PATH", "")  # none is there
    monkeypatch.chdir(tmp_path)  # nor ds_configs/
    file = tmp_path / "hosts"
    file.write_text("localhost slots=2\n")
    hosts = parse_hostfile(file)
    [probed] = probe(hosts, shared=tmp_path)
    assert probed.faults == []
    assert probed.facts is not None
    assert probed.facts.reads_shared
    with pytest.raises(UserError, match="runs does not exist; create it where all"):
        probe(hosts, shared=tmp_path / "runs")
    with pytest.raises(UserError, match="--probe: needs ssh"):
        probe([*hosts, Host("b", 2, 2)], shared=tmp_path)


def test_the_examples_that_ship_are_good() -> None:
    examples = sorted((Path(__file__).parents[1] / "hostfiles").iterdir())
    assert len(examples) >= 3
    for path in examples:
        assert parse_hostfile(path)


def test_environment_file_with_blank_and_comment_lines_is_read(tmp_path: Path) -> None:
    path = tmp_path / ".deepspeed_env"
    path.write_text("# network\n\nNCCL_SOCKET_IFNAME = eth0\nEMPTY=\n")
    assert read_environment_file(path) == {"NCCL_SOCKET_IFNAME": "eth0", "EMPTY": ""}


@pytest.mark.parametrize("line", ["HF_TOKEN=abc", "AWS_SECRET_ACCESS_KEY=x", "nonsense", "A=$(id)"])
def test_secrets_and_shell_text_never_reach_a_command_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / ".deepspeed_env"
    path.write_text(f"OK=1\n{line}\n")
    with pytest.raises(UserError, match="line 2"):
        read_environment_file(path)


def test_what_turns_nvlink_multicast_off_reaches_other_hosts_and_a_token_does_not() -> None:
    off = {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }
    rest = {"HOME": "/root", "TORCH_HUB_TOKEN": "$abc", "NCCL_DEBUG_FILE": "$(id)"}
    assert forwarded_environment({**off, **rest}, files=()) == off


def test_what_deepspeed_passes_on_by_itself_holds_no_secret_and_no_shell_text(
    tmp_path: Path,
) -> None:
    hostfile, lines = tmp_path / "hostfile", tmp_path / "deepspeed_env"
    hostfile.write_text("a slots=1\nb slots=1\n")
    lines.write_text("UCX_NET_DEVICES=mlx5_0:1\nTZ=UTC\n")
    for name in ("pdsh", "mpirun", "ompi_info"):
        program = tmp_path / name
        program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        program.chmod(0o755)
    given = {
        "UCX_LOG_FILE": "/logs/$RANK",
        "UCX_NET_DEVICES": "`id`",
        "UCX_LOG_LEVEL": "a b",
        "NCCL_DEBUG_FILE": "/logs/nccl.$RANK",
        "NCCL_NET": "IB",
        "MLFLOW_TRACKING_PASSWORD": "hunter2",
    }
    environment = {
        **runs.environment(),
        **given,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "DS_ENV_FILE": str(lines),
        "DS_ACCELERATOR": "cuda",
        RUN_ID_VARIABLE: "x",
    }
    warned = [line.split()[0] for line in forwarding_warnings(given, files=(lines,))]
    assert warned == ["NCCL_DEBUG_FILE", "UCX_LOG_FILE"]
    assert len(forwarding_warnings({"PYTHONPATH": "$x", "MLFLOW_RUN": "$x"}, files=())) == 2
    for launcher in ("pdsh", "openmpi"):
        command = [sys.executable, "-m", "sgt_ds.launch.multinode", "--log_level=error"]
        command += [f"--hostfile={hostfile}", f"--launcher={launcher}", "--force_multi"]
        command += ["--no_ssh_check", "--master_addr=127.0.0.1", "--module", "sgt_ds.train", "run"]
        told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert told.returncode == 0, told.stderr
        lines_told = re.split(r"; |\n", told.stdout)
        exported = dict(re.findall(r"^(?:export )?(\w+)=(.*)$", "\n".join(lines_told), re.M))
        assert exported["UCX_NET_DEVICES"] == "mlx5_0:1"
        assert (exported["NCCL_NET"], exported["UCX_LOG_LEVEL"]) == ("IB", '"a b"')
        assert "PYTHONPATH" in exported
        assert not exported.keys() & {"UCX_LOG_FILE", "NCCL_DEBUG_FILE"}
        assert "hunter2" not in told.stdout


def test_a_variable_whose_value_cannot_be_passed_on_is_left_out_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, hostfile = runs.write_run(tmp_path / "run.yaml", runs.write_data(tmp_path)), tmp_path / "h"
    hostfile.write_text("a slots=1\nb slots=1\n")
    for name in ("HOME", "NCCL_NET", "NCCL_ALGO", "TORCH_HUB_TOKEN"):
        monkeypatch.setenv(name, "$x")
    (tmp_path / ".deepspeed_env").write_text("NCCL_ALGO=Ring\n")  # says how it is meant
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sgt_ds.launch.check_launch", lambda *given: None)  # it would ask the hosts

    def start_twice(prepare: Callable[[Sequence[str]], Launch], **settings: object) -> int:
        prepare(())
        prepare(())
        return 0

    monkeypatch.setattr("sgt_ds.launch.supervise", start_twice)
    for flags, warned in (((), ()), (("--hostfile", str(hostfile)), ("NCCL_NET",))):
        assert main(["train", str(run), *flags]) == 0
        told = capsys.readouterr().err
        assert re.findall(r"warning: (\w+) is not passed on to the hosts", told) == [*warned]
        assert "$x" not in told


def test_a_hung_run_waits_for_a_host_that_is_cut_off_as_long_as_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def note(commands: dict[str, list[str]]) -> dict[str, Answer]:
        asked.extend(w for w in commands["a"] if w.startswith("ConnectTimeout="))
        return {"a": Answer("0", "", 0.0)}

    monkeypatch.setattr(processes, "ask", note)
    for hurried in (False, True):
        assert processes.on_hosts("kill", "run", ["a"], None, hurried=hurried) == {"a": "0"}
    assert asked == ["ConnectTimeout=10", "ConnectTimeout=5"]


def test_a_host_whose_connection_never_closes_is_given_up() -> None:
    began = time.monotonic()
    lasting = ["sh", "-c", "setsid sleep 40 & sleep 40"]  # what it started keeps its output open
    answers = ask({"a": lasting, "b": ["echo", "here"]}, within_seconds=1)
    assert "did not answer" in answers["a"].fault
    assert answers["b"].output == "here"
    assert time.monotonic() - began < 30


def test_the_raw_launchers_hostfile_in_run_dir_is_somebody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def past_the_check(*_: object) -> None:
        raise UserError("told", None, "past the check")

    monkeypatch.setattr(train, "_warn", past_the_check)
    monkeypatch.delenv(RUN_ID_VARIABLE, raising=False)
    run = runs.write_run(tmp_path / "run.yaml", runs.write_data(tmp_path / "data"))
    for name, text, told in (
        ("hosts", "worker-1 slots=8\n", "told: past the check"),
        (
            "notes",
            "worker-1 is slow\n",
            f"{tmp_path / 'run'}: run_dir: holds notes, which is not part",
        ),
    ):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / name).write_text(text)
        assert train.main([str(run)]) == 2
        assert capsys.readouterr().err.startswith(f"sgt-ds train: {told}")
