"""What a launcher (torchrun, DeepSpeed's, mpirun) tells each process by variables. Joins nothing."""

from __future__ import annotations

import os

from sgt_ds.errors import UserError

# In this order: `sgt-ds train` and DeepSpeed's launcher run below mpirun or Slurm, too.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def launcher_number(*names: str, lowest: int = 0) -> int | None:
    """The whole number in the first of these variables that holds anything; None where none does.

    Raises: UserError, naming the variable, where it holds something else, or less than `lowest`.
    """
    name = next((name for name in names if os.environ.get(name, "").strip()), None)
    if name is None:
        return None
    text = os.environ[name].strip()
    if not (text.isascii() and text.isdecimal() and int(text) >= lowest):
        message = f"{text[:40]!r} is not a whole number of {lowest} or more; correct or unset it"
        raise UserError("environment", name, message)
    return int(text)


def told_rank() -> int | None:
    """The rank of this process; None where no launcher started it. Raises: UserError."""
    return launcher_number(*_RANKS)


def told_world_size() -> int:
    """Ranks of the run; 1 where no launcher started this process. Raises: UserError."""
    if told_rank() is None:
        return 1
    size = launcher_number(*_WORLD_SIZES, lowest=1)
    if size is None:
        message = "is not set, though this process has a rank; let a launcher set both, or neither"
        raise UserError("environment", _WORLD_SIZES[0], message)
    return size


def told_local_size() -> int:
    """Ranks on this host; 1 where the launcher does not tell, or tells 0. Raises: UserError."""
    return next((size for name in _LOCAL_SIZES if (size := launcher_number(name))), 1)
