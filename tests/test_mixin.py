"""The SGT class under `transformers`' own model tests, from its source distribution."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import transformers
from source_code import source_of

HERE = Path(__file__).parent
GUIDE = HERE.parent / "docs" / "inference.md"

# Why a test of theirs may be left out, and nothing else: a part of what it says, and the guide's
# words for it. What the machine lacks may run on another one.
MACHINE = {
    "test requires accelerator": "needs a GPU",
    "test requires multiple accelerators": "needs two GPUs",
    "test requires Flash Attention": "needs the package flash-attn, for GPUs",
    "test requires MPS": "needs Apple's GPUs",
    "test requires the kernels library": "downloads kernels for GPUs",
    "test is slow": "runs in their own nightly tests: compiled training",
}
COMPOSITE, EXPERTS = "for models composed of several", "for mixtures of experts"
KIND = {
    "is not composite": COMPOSITE,
    "Model is not a composite model": COMPOSITE,
    "No subconfigs": COMPOSITE,
    "does not support SDPA": COMPOSITE,  # whatever it says
    "does not support grouped_mm": EXPERTS,
    "sparse experts": EXPERTS,
    "output_router_logits": EXPERTS,
    "No sequence-to-sequence": "for encoder-decoders",
    "axial RoPE": "for models of images",
    "partial rope": "for models that turn a part of each head",
    "sliding window": "for models with sliding windows",
    "Model does not have position embeddings": "for models with learned positions",
    "No conversion found": "SGT's weights keep their names",
    "_keep_in_fp32_modules": "SGT keeps nothing in float32 by name",
    "does not have a TP plan": "SGT has no sharding by head",
    "Not a prioritized model": "for a list of their own models",
}
REASONS = {**MACHINE, **KIND}


@pytest.fixture(scope="module")
def their_tests(request: pytest.FixtureRequest) -> Path:
    """The `tests` folder of the installed version's source distribution."""
    version = transformers.__version__
    return source_of("transformers", version, ("/tests/",), request.config) / "tests"


def as_table(skipped: dict[str, str]) -> str:
    """Test and reason, as the guide has them."""
    rows = ["| reason | tests |", "|---|---|"]
    for why in dict.fromkeys(REASONS.values()):
        names = ", ".join(f"`{name}`" for name in sorted(skipped) if skipped[name] == why)
        rows += [f"| {why} | {names} |"] if names else []
    return "\n".join(rows)


def in_the_guide() -> tuple[dict[str, str], dict[str, tuple[int, int]]]:
    """Which tests are skipped there and why; of each version, how many pass and are skipped."""
    text = GUIDE.read_text()
    row = r"^\| ([^|]+?)(?: \(only ([\d.]+)\))? \| (`test_\w+`(?:, `test_\w+`)*) \|$"
    listed = {
        name: why
        for why, only, names in re.findall(row, text, re.MULTILINE)
        if transformers.__version__.startswith(only)
        for name in re.findall(r"\w+", names)
    }
    told = r"of ([\d.]+)'s, (\d+) pass and (\d+) are skipped, of ([\d.]+)'s (\d+) and (\d+)"
    (found,) = re.findall(told, " ".join(text.split()))
    counts = {found[at]: (int(found[at + 1]), int(found[at + 2])) for at in (0, 3)}
    return listed, counts


def test_a_model_class_that_breaks_what_transformers_asks_of_any(
    their_tests: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(HERE), "-q"]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}", str(HERE / "mixin_sgt.py")]
    known = {"TRANSFORMERS_TESTS": str(their_tests), "HF_HUB_OFFLINE": "1", "PYTEST_ADDOPTS": ""}
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
    said = {
        (str(case.get("name")), str(skip.get("message")))
        for case in cases
        for skip in case.findall("skipped")
    }
    skipped = {name: why for name, words in said for part, why in REASONS.items() if part in words}
    unexplained = {(name, words) for name, words in said if not any(r in words for r in REASONS)}
    assert not unexplained
    names = {str(case.get("name")) for case in cases}
    passed = names - skipped.keys()
    assert len(passed) > 100
    assert {"test_left_padding_compatibility", "test_save_load", "test_torch_export"} <= passed

    listed, counts = in_the_guide()
    wrong = {name for name, why in skipped.items() if listed.get(name) != why}
    if torch.cuda.is_available():  # what needs one runs, or is skipped for what else it needs
        wrong -= {name for name, why in listed.items() if why in MACHINE.values()}
    assert not wrong, f"{GUIDE} should say:\n{as_table(skipped)}"
    if transformers.__version__ == next(iter(counts)):  # a test of theirs may be newer than others
        stale = listed.keys() - skipped.keys()
        if torch.cuda.is_available():
            stale = {name for name in stale if listed[name] in KIND.values()}
        assert not stale | (listed.keys() - names)
    if transformers.__version__ in counts and not torch.cuda.is_available():
        (found,) = re.findall(r"(\d+) passed, (\d+) skipped", done.stdout)
        assert tuple(map(int, found)) == counts[transformers.__version__]
