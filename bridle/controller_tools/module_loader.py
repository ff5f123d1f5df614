"""Loads an operator's modules: trusted code, named by the operator's flags or files, never by a request."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from bridle.errors import InvalidRequest
from bridle.safe_repr import short_repr


def load_module(name: str, param: str) -> ModuleType:
    """Return the module with this name, or the module in this Python file. Raises `InvalidRequest` about `param`."""
    try:
        if not name.endswith(".py"):
            if "" not in sys.path:  # modules next to the command, as with `python -m`
                sys.path.insert(0, "")
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(f"bridle_class_{Path(name).stem}", name)
        if spec is None or spec.loader is None:
            raise ImportError(f"{name} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # so that its objects can be copied
        spec.loader.exec_module(module)
    except Exception as error:
        raise InvalidRequest(
            f"{param}: {short_repr(name)} cannot be loaded: {type(error).__name__}: {error}", param
        ) from error
    return module
