"""The runs in ds_configs/ that a user can start: whether they are what their first lines say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from runs import ROOT

from sgt_ds import cli
from sgt_ds.config import load_run_config, read_deepspeed_json
from sgt_ds.flops import vanilla_flops_per_token
from sgt_ds.launch import parse_hostfile, world_size
from sgt_ds.telemetry import peak_flops
from sgt_ds.telemetry.metric import STEP_BUCKETS_SECONDS

PRESETS = sorted((ROOT / "ds_configs").glob("*.yaml"))
# What the CUDA context, NCCL and the allocator's fragments take beside what is planned.
LEFT_FREE = 0.1


def test_there_is_nothing_to_start_from() -> None:
    found = {path.stem for path in PRESETS}
    assert {"275m_one_gpu", "573m_one_gpu", "573m_one_host", "1.2b_hosts"} <= found


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_does_not_fit_what_it_says_it_fits(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    text = path.read_text()
    memory = re.search(r"with (\d+) GB", text.partition("\n")[0])
    plan, start = re.findall(r"^#   sgt-ds (.+)$", text, re.MULTILINE)
    assert memory
    words = plan.split()
    assert cli.main([*words, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["memory_bytes"]["total"] < (1 - LEFT_FREE) * int(memory[1]) * 1e9
    # It ends fixed: nine windows from update 250 on, of which the last is at 2,250.
    assert planned["events"][-1]["step"] == 2250
    # Nothing but that the user has yet to prepare the data.
    (warning,) = planned["warnings"]
    assert warning.startswith("data.train.0.path: shards/c4 is not on this machine (and 1 more); ")

    ranks = int(words[-1])
    started = start.split()
    assert started[:2] == ["train", f"ds_configs/{path.name}"] == ["train", words[1]]
    if "--hostfile" in started:
        assert world_size(parse_hostfile(Path(started[started.index("--hostfile") + 1]))) == ranks
    else:
        assert started[started.index("--num-gpus") + 1] == str(ranks)

    config = load_run_config(path)
    assert config.run_dir.name == path.stem
    assert read_deepspeed_json(config.deepspeed)["bf16"]["enabled"] is True
    # The paper's recipe.
    assert (config.training.steps, config.training.global_batch_size) == (5035, 1024)
    assert (config.growth.t_start, config.growth.interval) == (250, 250)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_an_update_of_a_preset_lasts_longer_than_the_histogram_can_tell(path: Path) -> None:
    # Beyond the last bound every quantile is that bound.
    assert STEP_BUCKETS_SECONDS[0] < update_seconds(path) < STEP_BUCKETS_SECONDS[-1]


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_crash_of_a_preset_loses_more_than_two_hours(path: Path) -> None:
    assert load_run_config(path).checkpoint.every * update_seconds(path) < 7200


def update_seconds(path: Path) -> float:
    """Of the slowest GPUs that a preset is for, at an MFU that a run should reach."""
    config = load_run_config(path)
    (ranks,) = re.findall(r"^#   sgt-ds plan .* (\d+)$", path.read_text(), re.MULTILINE)
    length = config.data.sequence_length
    flops = vanilla_flops_per_token(config.model, length) * length
    peak = peak_flops("NVIDIA A100-SXM4-40GB")
    assert peak is not None
    return config.training.global_batch_size * flops / (int(ranks) * 0.4 * peak)
