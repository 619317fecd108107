"""What `init` may name: a folder that `sgt-ds import` wrote. Knows it by its files, reads none."""

from __future__ import annotations

from pathlib import Path

from sgt_ds.errors import UserError

# As checkpoints and their writers name them.
_SEAL, _WEIGHTS, _MODEL = "manifest.json", "model.safetensors*", "config.json"


def check_start(path: Path) -> None:
    """Raises: UserError where `path` is no training start, with what it is instead."""
    if (path / _SEAL).is_file():
        return
    if not path.is_dir():
        fault = "is no folder that `sgt-ds import` wrote; check the path"
    elif any(path.glob(_WEIGHTS)) or (path / _MODEL).is_file():
        fault = (
            "is a model of transformers, no training start; "
            f"`sgt-ds import {path} --out DIR` makes one of a LLaMA"
        )
    elif any(path.glob("step-*")) or any(path.glob("checkpoints/step-*")):
        fault = "holds checkpoints, no training start; name one of them as `fork`"
    else:
        fault = "holds no training start (no manifest.json); give what `sgt-ds import` wrote"
    raise UserError(path, "init", fault)
