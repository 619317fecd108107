"""Random number generators of one process, to and from safetensors. Knows no checkpoint.

Covers torch (CPU and the current CUDA device), numpy's global generator, and Python's.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from sgt_ds.errors import UserError


def rng_bytes() -> bytes:
    """The state of every generator of this process, as a safetensors file.

    Tensors: `torch_cpu`, `torch_cuda` uint8; `numpy` uint32 (624,); `python` uint32 (625,).
    """
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, python_gauss = random.getstate()
    tensors = {
        "torch_cpu": torch.get_rng_state().numpy(),
        "numpy": np.asarray(keys, dtype=np.uint32),
        "python": np.asarray(words, dtype=np.uint32),
    }
    if torch.cuda.is_available():
        tensors["torch_cuda"] = torch.cuda.get_rng_state().numpy()
    scalars = {
        "numpy": [name, int(position), int(has_gauss), float(gauss)],
        "python": [version, python_gauss],
    }
    return bytes(save(tensors, metadata={"scalars": json.dumps(scalars)}))


def load_rng(path: Path) -> None:
    """Put every generator back to where `rng_bytes` found it.

    Raises: UserError where the file holds something else.
    """
    try:
        if path.is_symlink():
            raise OSError("is a link")
        with safe_open(path, framework="numpy") as stream:
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
            scalars = json.loads((stream.metadata() or {})["scalars"])
        torch.set_rng_state(torch.from_numpy(tensors["torch_cpu"].copy()))
        # A run may continue without the accelerator it started with; its state has no use there.
        if "torch_cuda" in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.from_numpy(tensors["torch_cuda"].copy()))
        name, position, has_gauss, gauss = scalars["numpy"]
        np.random.set_state((name, tensors["numpy"], position, has_gauss, gauss))
        version, python_gauss = scalars["python"]
        if python_gauss is not None and not isinstance(python_gauss, float):
            raise TypeError("Python's cached normal sample is not a number")
        random.setstate((version, tuple(tensors["python"].tolist()), python_gauss))
    except (
        *(OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError),
        *(OverflowError, AttributeError, IndexError),
    ) as error:
        raise UserError(
            path,
            None,
            f"does not hold the random state of a rank ({error}); use another checkpoint",
        ) from None
