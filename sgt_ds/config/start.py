"""What `init` may name: a folder written by `sgt-ds import`. Looks at its files, reads no weights."""

from __future__ import annotations

import json
from pathlib import Path

from sgt_ds.errors import UserError

# As checkpoints and their writers name them.
_SEAL, _WEIGHTS, _MODEL = "manifest.json", "model.safetensors*", "config.json"


def check_start(path: Path) -> None:
    """Raises: UserError where `path` is no training start, with what it is instead."""
    if (path / _SEAL).is_file():
        return
    if not path.is_dir():
        fault = "is not a folder written by `sgt-ds import`; check the path"
    elif _has_loops(path / _MODEL):
        fault = (
            "is an export with loops, which a training start cannot hold; name a checkpoint of its "
            "run as `fork`"
        )
    elif any(path.glob(_WEIGHTS)) or (path / _MODEL).is_file():
        fault = (
            "is a transformers model, not a training start; convert a LLaMA with `sgt-ds import "
            f"{path} --out DIR`"
        )
    elif any(path.glob("step-*")) or any(path.glob("checkpoints/step-*")):
        fault = "holds checkpoints, not a training start; name one of them as `fork`"
    else:
        fault = (
            "holds no training start (no manifest.json); give a folder written by `sgt-ds import`"
        )
    raise UserError(path, "init", fault)


def _has_loops(config: Path) -> bool:
    """Whether it is of an export that `sgt-ds import` refuses for its loops."""
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and values.get("model_type") == "sgt"
