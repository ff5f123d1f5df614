"""Names that the previous release used for modules, exports and log fields.

The old names still work, but old Python names give a warning. The next release will remove the old names.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

#: New names of modules by their old names. A package stands for all modules in it that kept their own name.
MODULES = {
    "bridle.cluster": "bridle.distributed",
    "bridle.cluster.remote": "bridle.distributed.remote_executor",
    "bridle.constraints": "bridle.structured_output",
    "bridle.deploy": "bridle.launch",
    "bridle.elsewhere": "bridle.compat",
    "bridle.engine.decision": "bridle.engine.control.decision",
    "bridle.media": "bridle.multimodal",
    "bridle.native": "bridle.cpu_kernels",
    "bridle.outbound": "bridle.safe_http",
    "bridle.progress": "bridle.load_progress",
    "bridle.service": "bridle.serving",
    "bridle.service.control": "bridle.serving.controller_runtime",
    "bridle.service.replay": "bridle.serving.tracing.replay",
    "bridle.testing.late": "bridle.testing.async_executor",
    "bridle.text": "bridle.tokenizer",
    "bridle.tools": "bridle.controller_tools",
    "bridle.traced": "bridle.traces",
    "bridle.traced.colours": "bridle.traces.highlight",
    "bridle.traced.rebuild": "bridle.traces.replay_text",
}
#: Old and new names of fields in a request's log line. Lines in JSON have both names.
LOG_FIELDS = {"opening_ms": "controller_start_ms", "held_ms": "controller_wait_ms", "spared": "best_of_saved"}
#: Old and new names of exports, by package.
NAMES: dict[str, dict[str, str]] = {
    "bridle.engine.interfaces": {
        "Drawing": "PendingSample",
        "EarlySampler": "AsyncSampler",
        "ForesightedPool": "ControllerPool",
        "ForetoldPool": "ControllerPool",
        "GuidingPool": "ControllerPool",
        "Interruptible": "SupportsReconnect",
        "LateExecutor": "AsyncExecutor",
        "LeadingPool": "ControllerPool",
    },
    "bridle.lmtp": {"Patience": "RetryPolicy"},
    "bridle.traces": {
        "Chunk": "ChunkRecord",
        "End": "EndRecord",
        "Exchange": "ExchangeRecord",
        "Fork": "ForkRecord",
        "Header": "TraceHeader",
        "Log": "LogRecord",
        "Prompt": "PromptRecord",
        "Replaced": "ReplacedRecord",
        "Rewind": "RewindRecord",
        "Stored": "StoredRecord",
        "Token": "TokenRecord",
        "Wait": "WaitRecord",
    },
}


def old_names(module: str, more: Callable[[str], Any] | None = None) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which resolves old names first and then the names that `more` resolves."""

    def get(name: str) -> Any:
        new = NAMES[module].get(name)
        if new is not None:
            warnings.warn(f"{module}.{name} is called {new} now", DeprecationWarning, stacklevel=2)
            return getattr(import_module(module), new)
        if more is not None:
            return more(name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get


def new_module(name: str) -> str | None:
    """Return the current name of a module, or None if it was not renamed."""
    head, rest = name, ""
    while head not in MODULES:
        head, dot, last = head.rpartition(".")
        rest = f".{last}{rest}"
        if not dot:
            return None
    new = MODULES[head] + rest
    return new if not rest or find_spec(new) is not None else None


class _Renamed:
    """Imports a module of an old name as the module with the new name, so that there is only one copy."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("bridle.") or new_module(fullname) is None:
            return None
        return ModuleSpec(fullname, self)  # type: ignore[arg-type]  # importing the base class is slow

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = new_module(spec.name)
        assert new is not None
        warnings.warn(f"{spec.name} is called {new} now", DeprecationWarning, stacklevel=2)
        module = import_module(new)
        self._specs[module.__name__] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec of the renamed module, which the import replaced by the spec of the old name. The module is
        not run again."""
        module.__spec__ = self._specs.pop(module.__name__)


def install() -> None:
    """Install this finder first, because other finders would load a second copy of a renamed module."""
    if not any(isinstance(finder, _Renamed) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Renamed())
