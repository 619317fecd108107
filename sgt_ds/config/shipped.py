"""Files of `ds_configs/` shipped with this package. Knows names and places, no contents."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

_FOLDER = "ds_configs"
_CHECKOUT = Path(__file__).parents[2]


def shipped_config(path: Path) -> Path | None:
    """Where `ds_configs/NAME` lies that came with this package; None where it brought none."""
    return _shipped().get(path.as_posix())


def shipped_names(suffix: str) -> str:
    """All of them that end so, as a run names them, for a message."""
    return ", ".join(sorted(name for name in _shipped() if name.endswith(suffix))) or "none"


def _shipped() -> dict[str, Path]:
    """Those of a checkout, or those that the wheel laid down, by the names that runs give them."""
    found = list((_CHECKOUT / _FOLDER).glob("*.*"))
    if not found:
        with suppress(PackageNotFoundError):
            listed = files("sgt-ds") or ()
            found = [Path(file.locate()) for file in listed if file.match(f"{_FOLDER}/*.*")]
    return {f"{_FOLDER}/{file.name}": file for file in found}
