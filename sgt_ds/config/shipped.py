"""Files that are shipped with this package. Knows names and places, no contents."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

_CONFIGS, _HOSTFILES = "ds_configs", "hostfiles"
_CHECKOUT = Path(__file__).parents[2]


def shipped_config(path: Path) -> Path | None:
    """Where `ds_configs/NAME` lies that came with this package; None where it brought none."""
    return _shipped(_CONFIGS).get(path.as_posix())


def shipped_hostfile(path: Path) -> Path | None:
    """Where the example `hostfiles/NAME` lies, to be copied: the hosts in it are no one's."""
    return _shipped(_HOSTFILES).get(path.as_posix())


def shipped_names(suffix: str) -> str:
    """All of them that end so, as a run names them, for a message."""
    return ", ".join(sorted(name for name in _shipped(_CONFIGS) if name.endswith(suffix))) or "none"


def _shipped(folder: str) -> dict[str, Path]:
    """Those of a checkout, or those that the wheel laid down, by the names that users give them."""
    found = [path for path in (_CHECKOUT / folder).glob("*") if path.is_file()]
    if not found:
        with suppress(PackageNotFoundError):
            listed = files("sgt-ds") or ()
            found = [Path(file.locate()).resolve() for file in listed if file.match(f"{folder}/*")]
    return {f"{folder}/{file.name}": file for file in found}
