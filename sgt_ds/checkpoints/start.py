"""A training start: weights of an external model, sealed by a checkpoint manifest.

Holds safetensors in float32 under LLaMA's names, `state.json` with the model's shape, and what else
its writer put in. Knows no optimizer, no rank and no torch: who reads tensors brings a reader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sgt_ds import __version__
from sgt_ds.checkpoints.manifest import (
    FORMAT,
    STATE_NAME,
    Manifest,
    read_manifest,
    record_of,
    write_manifest,
)
from sgt_ds.checkpoints.store import read_state, verify
from sgt_ds.config import ModelConfig
from sgt_ds.errors import UserError
from sgt_ds.files import write_text_atomically

_KIND = "start"


@dataclass(frozen=True, slots=True)
class Start:
    """A verified training start. `weights`: its safetensors files, in order."""

    path: Path
    model: ModelConfig
    weights: tuple[Path, ...]


def seal_start(folder: Path, model: ModelConfig, facts: Mapping[str, Any]) -> None:
    """Make the files in `folder` a training start of shape `model`.

    `facts`: JSON-able, kept for people. Raises: OSError.
    """
    state = {
        "format": FORMAT,
        "version": __version__,
        "step": 0,
        "world_size": 0,
        "kind": _KIND,
        "model": model.model_dump(mode="json"),
        **facts,
    }
    write_text_atomically(folder / STATE_NAME, json.dumps(state, indent=1) + "\n")
    files = {path.name: record_of(path) for path in sorted(folder.iterdir())}
    write_manifest(folder, Manifest(step=0, sequence=0, world_size=0, files=files))


def read_start(path: Path) -> Start:
    """The start in `path`, every byte of it verified.

    Raises: UserError where it is damaged, or nothing that `sgt-ds import` wrote.
    """
    if not path.is_dir():
        raise UserError(path, "init", "is not a folder; give one written by `sgt-ds import`")
    faults = verify(path)
    if faults:
        raise UserError(path, None, f"{faults[0]}; import it again")
    state = read_state(path)
    if state.get("kind") != _KIND:
        raise UserError(path, "init", "is a checkpoint, not an import; use `fork` or `resume`")
    try:
        model = ModelConfig.model_validate(state.get("model"))
    except ValidationError:
        raise UserError(
            path / STATE_NAME, "model", "is not a valid model shape; import again"
        ) from None
    names = sorted(n for n in read_manifest(path).files if n.endswith(".safetensors"))
    return Start(path, model, tuple(path / name for name in names))
