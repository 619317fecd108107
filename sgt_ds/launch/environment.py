"""What a launch passes to the processes of every host: an allow-list of variables, as one file.

DeepSpeed puts what it forwards on a command line, where every user of a host can read it; so no
secret may be among it. Its own reader of `.deepspeed_env` fails on a blank line; this one does not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from sgt_ds.errors import UserError, refusal

# Where ranks meet, for a launcher that does not tell them (mpirun).
MASTER_ADDRESS_VARIABLE = "SGT_MASTER_ADDR"
MASTER_PORT_VARIABLE = "SGT_MASTER_PORT"

# Where a host's launcher leaves word of a rank that a signal ended.
SIGNS_VARIABLE = "SGT_SIGNS_OF_LIFE"

ENV_FILE_NAME = ".deepspeed_env"

# What training on another host may need of this one's environment.
FORWARDED_PREFIXES = (
    *("NCCL_", "NVSHMEM_", "GLOO_", "UCX_", "OMP_", "MKL_", "CUDA_DEVICE", "TORCH_", "SGT_"),
)
FORWARDED_NAMES = frozenset({"CC", "CXX", "TORCHINDUCTOR_CACHE_DIR", "LD_LIBRARY_PATH", "TZ"})
# DeepSpeed's runner passes these on by itself, PYTHONPATH with the current directory before it.
_BY_DEEPSPEED = ("PYTHON", "MLFLOW", "MV2", "UCX")

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"SECRET|PASSWORD|PASSWD|TOKEN|CREDENTIAL|API_?KEY|PRIVATE_?KEY|ACCESS_?KEY")
# DeepSpeed quotes values with '"' alone: these would still be read by the remote shell.
_SHELL = re.compile(r"[\"`$\\\n\r\0]")


def forwarded_environment(
    environment: Mapping[str, str], files: tuple[Path, ...] | None = None
) -> dict[str, str]:
    """Variables for the processes of every host: from this environment and `.deepspeed_env` files.

    `files`: by default the ones that DeepSpeed reads, in the home and the current directory.
    Raises: UserError where a file's line is no assignment, or would put a secret or shell text on a
    command line.
    """
    wanted = _wanted(environment)
    chosen = {name: value for name, value in wanted.items() if not _SHELL.search(value)}
    return chosen | _in_files(files)


def forwarding_warnings(
    environment: Mapping[str, str], files: tuple[Path, ...] | None = None
) -> list[str]:
    """A line for each variable that reaches no other host because of its value.

    Raises: as `forwarded_environment` does.
    """
    given = _in_files(files)
    wanted = _wanted(environment, (*FORWARDED_PREFIXES, *_BY_DEEPSPEED))
    return [
        f"{name} is not passed on to the hosts, because its value holds shell characters; set it in "
        "each host's own environment"
        for name, value in sorted(wanted.items())
        if _SHELL.search(value) and name not in given
    ]


def is_fit_for_a_command_line(name: str, value: str) -> bool:
    """Whether it is no secret, and a shell between double quotes takes it as it is."""
    safe = _VARIABLE.fullmatch(name) is not None and not _SECRET.search(name.upper())
    return safe and not _SHELL.search(value)


def _wanted(
    environment: Mapping[str, str], prefixes: tuple[str, ...] = FORWARDED_PREFIXES
) -> dict[str, str]:
    """What training on another host may need of it, and may be read by others."""
    return {
        name: value
        for name, value in environment.items()
        if (name.startswith(prefixes) or name in FORWARDED_NAMES) and not _SECRET.search(name)
    }


def _in_files(files: tuple[Path, ...] | None) -> dict[str, str]:
    if files is None:
        files = (Path.home() / ENV_FILE_NAME, Path(ENV_FILE_NAME))
    chosen: dict[str, str] = {}
    for path in files:
        chosen.update(read_environment_file(path))
    return chosen


def read_environment_file(path: Path) -> dict[str, str]:
    """`NAME=value` lines of a `.deepspeed_env` file; comments and blank lines are fine.

    An absent file is empty. Raises: UserError with the line's number.
    """
    if not path.is_file():
        return {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(path, None, refusal(error, "read", "give a UTF-8 text file")) from None
    chosen: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        name, value = name.strip(), value.strip()
        field = f"line {number}"
        if not equals or _VARIABLE.fullmatch(name) is None:
            raise UserError(path, field, "is not NAME=value; correct or remove it")
        if _SECRET.search(name.upper()):
            raise UserError(
                path,
                field,
                f"{name} would be visible to every user on a command line; set it in each host's "
                "own environment",
            )
        if _SHELL.search(value):
            raise UserError(path, field, f"the value of {name} holds shell characters; remove them")
        chosen[name] = value
    return chosen


def write_environment_file(path: Path, variables: Mapping[str, str]) -> None:
    """Write the variables in the one form that DeepSpeed's reader takes; only the user may read."""
    text = "".join(f"{name}={value}\n" for name, value in sorted(variables.items()))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
