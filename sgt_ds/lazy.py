"""Names of a package whose modules are imported when they are first asked for. Knows no room."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


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
