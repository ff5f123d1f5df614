"""AICI: the protocol between an engine and a control runtime, both of its sides.

`protocol` (messages), `channels` (shared memory) and `masks` (bias rows) are common to both sides. `runtime` is the
process that hosts controllers, `client` connects it to bridle's engine, `Runner` to any other. Modules are imported on
first use, because the runtime's processes need few of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridle.aici.client.process import RuntimeConfig
    from bridle.aici.client.reference import WasmController
    from bridle.aici.runner import Runner

__all__ = ["Runner", "RuntimeConfig", "WasmController"]

_HOMES = {
    "Runner": "bridle.aici.runner",
    "RuntimeConfig": "bridle.aici.client.process",
    "WasmController": "bridle.aici.client.reference",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
