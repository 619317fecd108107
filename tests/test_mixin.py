"""The SGT class under `transformers`' own model tests, from its source distribution."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import transformers

HERE = Path(__file__).parent

# Why a test of theirs may be left out, and nothing else.
REASONS = {
    # the machine
    "test requires accelerator": "no GPU",
    "test requires multiple accelerators": "no two GPUs",
    "test requires Flash Attention": "the package flash-attn, for GPUs; 2, 3 and 4",
    "test requires MPS": "Apple's GPUs",
    "test requires the kernels library": "downloads kernels for GPUs",
    "test requires PEFT": "an adapter library that nothing here uses",
    "test is slow": "their own nightly test: compiled training",
    # the kind of model
    "is not composite": "one model, not several in one",
    "Model is not a composite model": "the same",
    "No subconfigs": "the same",
    "does not support SDPA": "composite models only, whatever the reason says",
    "Not a prioritized model": "a list of their own models",
    "No conversion found": "weights keep their names",
    "No decoder-only language modeling head": "SgtModel, the one without a head",
    "No sequence-to-sequence": "a decoder",
    "does not support grouped_mm": "mixtures of experts",
    "sparse experts": "the same",
    "output_router_logits": "the same",
    "_keep_in_fp32_modules": "nothing is kept in float32 by name",
    "Model does not have position embeddings": "rotary ones have no weights",
    "axial RoPE": "images",
    "partial rope": "whole heads are turned",
    "sliding window": "no such attention",
    "does not have a TP plan": "sharding by head is not built",
    "not in MODEL_MAPPING": "a class of its own, loaded by auto_map",
}


@pytest.fixture(scope="module")
def their_tests(request: pytest.FixtureRequest) -> Path:
    """The `tests` folder of the installed version's source distribution."""
    version = transformers.__version__
    folder = Path(request.config.cache.mkdir(f"transformers-{version}"))
    root = folder / f"transformers-{version}" / "tests"
    if not (root / "test_modeling_common.py").is_file():
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        fetch += ["--no-build-isolation", "--no-binary", ":all:", f"transformers=={version}"]
        done = subprocess.run(
            [*fetch, "-d", str(folder)], capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            pytest.skip(f"pip cannot fetch the source of transformers {version}: {said}")
        with tarfile.open(folder / f"transformers-{version}.tar.gz") as archive:
            inside = [m for m in archive.getmembers() if "/tests/" in m.name]
            # Releases before 3.11.4 know no filter.
            safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(folder, members=inside, **safe)
    return root


def test_a_model_class_that_breaks_what_transformers_asks_of_any(
    their_tests: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(HERE), "-q"]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}", str(HERE / "mixin_sgt.py")]
    known = {"TRANSFORMERS_TESTS": str(their_tests), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command,
        env={**os.environ, **known},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    skipped = {
        str(case.get("name")): str(skip.get("message"))
        for case in cases
        for skip in case.findall("skipped")
    }
    unexplained = {
        name: said
        for name, said in skipped.items()
        if not any(reason in said for reason in REASONS)
    }
    assert not unexplained
    passed = {str(case.get("name")) for case in cases} - skipped.keys()
    assert len(passed) > 100
    assert {"test_left_padding_compatibility", "test_save_load", "test_torch_export"} <= passed
