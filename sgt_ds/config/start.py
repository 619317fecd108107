"""What `init` may name: a folder written by `sgt-ds import`. Checks its files, reads none."""

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
        fault = "is not a folder written by `sgt-ds import`; check the path"
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
