"""Starts real training runs for tests: data that can be learnt, a run file, the launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from token_sets import write_token_set
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from sgt_ds.checkpoints import newest_good, read_state
from sgt_ds.growth import DecisionLine, State, build_policy, decisions, read_journal
from sgt_ds.ports import free_ports

VOCABULARY = 300
ROOT = Path(__file__).parent.parent
CPU_FP32 = ROOT / "ds_configs" / "zero2_fp32_cpu.json"


def with_defaults(defaults: Sequence[str], *given: str) -> list[str]:
    """Options and their values as `given`, behind those of `defaults` that it does not give."""
    pairs = zip(defaults[::2], defaults[1::2], strict=True)
    return [*(word for pair in pairs if pair[0] not in given for word in pair), *given]


def markov_text(tokens: int, seed: int) -> npt.NDArray[np.int64]:
    """A chain in which each id is followed by one of four: ln 4 nats are left to a good model."""
    followers = np.random.default_rng(0).integers(0, VOCABULARY, (VOCABULARY, 4))
    choices = np.random.default_rng(seed).integers(0, 4, tokens)
    text = np.empty(tokens, dtype=np.int64)
    text[0] = 1
    for place in range(1, tokens):
        text[place] = followers[text[place - 1], choices[place]]
    return text


def word_tokenizer() -> bytes:
    """A tokenizer file in which word w17 is id 17."""
    words = {f"w{number}": number for number in range(VOCABULARY)}
    return Tokenizer(WordLevel(words, unk_token="w0")).to_str().encode()


def write_data(directory: Path) -> Path:
    """Prepared sets `train` and `val` under `directory`."""
    shards = [markov_text(20_000, seed) for seed in (1, 2)]
    tokenizer = word_tokenizer()
    write_token_set(directory / "train", shards, vocab_size=VOCABULARY, tokenizer=tokenizer)
    shard = markov_text(4_000, 3)
    write_token_set(directory / "val", [shard], vocab_size=VOCABULARY, tokenizer=tokenizer)
    return directory


def write_run(path: Path, data: Path, /, **sections: Any) -> Path:
    """A run file of a tiny model that grows early; `sections` replace or add keys of a section."""
    values: dict[str, Any] = {
        "preset": "tiny",
        "method": "sgt",
        "growth": {"k_max": 2, "layers": 3, "heads": 2, "t_start": 4, "interval": 2},
        "data": {
            "train": [{"path": str(data / "train")}],
            "validation": str(data / "val"),
            "sequence_length": 64,
        },
        "training": {
            "steps": 20,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "log_every": 1,
            "validate_every": 10,
            "validation_sequences": 16,
            "compile": False,
        },
        "optimizer": {"lr": 3.0e-3, "warmup_steps": 4},
        "checkpoint": {"every": 6, "keep_last": 3},
        "telemetry": {"port": free_ports(2)},
        "deepspeed": str(CPU_FP32),
        "run_dir": str(path.with_suffix("")),
    }
    for name, section in sections.items():
        both = isinstance(section, dict) and isinstance(values.get(name), dict)
        values[name] = {**values[name], **section} if both else section
    path.write_text(yaml.safe_dump(values))
    return path


def environment() -> dict[str, str]:
    """The environment of now, with the tests' interpreter first on the path and one thread a rank."""
    here = Path(sys.executable).parent
    return {**os.environ, "PATH": f"{here}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def launcher(run: Path, ranks: int, *overrides: str) -> list[str]:
    """The raw launcher's command line, on a free rendezvous port."""
    return [
        *("deepspeed", "--num_gpus", str(ranks), "--master_port", str(free_ports())),
        *("--module", "sgt_ds.train", str(run), *overrides),
    ]


def single(run: Path, *overrides: str) -> list[str]:
    """One rank without a launcher: quicker to start."""
    return [sys.executable, "-m", "sgt_ds.train", str(run), *overrides]


def run_to_end(command: Sequence[str], *, expect: int = 0, timeout: float = 240) -> str:
    """Run a command, check its exit status, and return what it printed."""
    done = subprocess.run(
        command, env=environment(), text=True, capture_output=True, timeout=timeout, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == expect, f"exit status {done.returncode}:\n{output[-4000:]}"
    return output


def end(process: subprocess.Popen[Any]) -> None:
    """End a process that a test started, with its children (it leads a process group)."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_step(run_dir: Path, step: int, timeout: float = 300) -> None:
    """Wait until metrics.jsonl holds `step`.

    A start takes 15 seconds, and 100 where ten other processes want the same core.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if last_step(run_dir) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"{run_dir} did not reach step {step} in {timeout} s")


def last_step(run_dir: Path) -> int:
    """The newest step of metrics.jsonl; 0 while it holds none, as just after a resume."""
    rows = metrics(run_dir)
    return int(rows[-1]["step"]) if rows else 0


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Whole rows of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def losses(run_dir: Path) -> dict[int, float]:
    """Training loss by step."""
    return {row["step"]: row["loss"] for row in metrics(run_dir) if "loss" in row}


def check_replay(run_dir: Path, *, ended: bool = True) -> list[str]:
    """Hold a run's journal to itself: its entropies lead to its own decisions and its own Θ.

    `ended`: whether it saved at its end; else it may have been killed at any moment.
    Returns the rules of its decisions, in order.
    """
    header, lines = read_journal(run_dir / "growth.jsonl", live=not ended)
    assert header is not None
    kept = list(lines)
    policy = build_policy(header.method, header.growth, header.model)
    own = [line.decision for line in kept if isinstance(line, DecisionLine)]
    again = list(decisions(kept, policy, header.growth.entropy_ema, obey_operator=True))
    by_policy = [decision for decision in own if decision.cause != "operator"]
    assert [decision.as_json() for decision in again] == [d.as_json() for d in by_policy]
    if not ended:
        return [decision.rule for decision in own]
    state = again[-1].after if again else policy.initial_state()
    newest = newest_good(run_dir / "checkpoints")
    assert newest is not None
    assert State.from_json(read_state(newest.path)["state"]) == state
    return [decision.rule for decision in own]


def journal_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Measurements and decisions of the growth journal."""
    lines = [json.loads(line) for line in (run_dir / "growth.jsonl").read_text().splitlines()]
    return [line for line in lines if line["type"] != "header"]


@contextmanager
def nobody() -> Iterator[None]:
    """Be a user who may not read, or enter, everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def scrape(targets: Path, rank: int) -> None:
    """As Prometheus does it."""
    [address] = [
        group["targets"][0]
        for group in json.loads(targets.read_text())
        if group["labels"]["rank"] == str(rank)
    ]
    headers = {"User-Agent": "Prometheus/3.0", "X-Prometheus-Scrape-Timeout-Seconds": "10"}
    request = urllib.request.Request(f"http://{address}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200
