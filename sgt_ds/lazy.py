"""Imports put off until they are needed, and whether they would find anything. Knows no room."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def is_installed(package: str) -> bool:
    """Whether a top-level package can be imported. Imports nothing."""
    spec = importlib.util.find_spec(package)
    # Any folder of that name on the path is found, such as W&B leaves where it runs: it has no file.
    return spec is not None and spec.origin is not None


def lazy_exports(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The `__getattr__` (PEP 562) of a package. `names`: what each of its modules exports.

    The function raises AttributeError for any other name.
    """
    module_of = {name: module for module, exported in names.items() for name in exported}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)

    return load
