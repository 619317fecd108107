"""The device named by the user, or a GPU if there is one. Knows no model."""

from __future__ import annotations

import torch

from sgt_ds.errors import UserError


def usable_device(name: str | None) -> torch.device:
    """The device of `--device`, as torch names it; None takes a GPU where there is one.

    Raises: UserError, with the devices that there are, where it cannot be used.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = ("cuda" if gpus else "cpu") if name is None else name
    if wanted.partition(":")[0] == "cuda" and not gpus:
        raise UserError("--device", None, f"{wanted}: torch sees no GPU here; use --device cpu")
    there = f"give {_listed(gpus)}"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise UserError("--device", None, f"'{wanted}' is not a device; {there}") from None
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise UserError("--device", None, f"'{wanted}' does not exist here; {there}")
    try:
        # Of what "meta" holds there are no values.
        torch.empty(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        # Of other kinds, torch says which of its own parts are missing.
        why = f" ({str(error).partition(chr(10))[0]})" if device.type == "cuda" else ""
        raise UserError("--device", None, f"'{wanted}' cannot be used here{why}; {there}") from None
    return device


def _listed(gpus: int) -> str:
    last = f" to cuda:{gpus - 1}" if gpus > 1 else ""
    return f"cpu, or cuda:0{last}" if gpus else "cpu"
