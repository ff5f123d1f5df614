"""Imports a package's names when they are first used. So a process that needs one module does not load all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """Return the `__getattr__` and `__all__` of a package. For each module, a string has the names that the module
    defines, separated by spaces."""
    homes = {name: f"{package}.{module}" for module, found in names.items() for name in found.split()}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, sorted(homes)
