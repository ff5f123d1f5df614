"""AICI: the protocol between an engine and a control runtime, with both of its sides.

Both sides use `protocol` (messages), `shm_channel` (shared memory) and `masks`. `runtime` is the process that hosts
controllers. `client` connects the runtime to bridle's engine, and `Runner` connects the runtime to any other engine.
Modules are imported on first use, because the runtime's processes need few of them.
"""

from typing import TYPE_CHECKING

from bridle.lazy_names import lazy_names

if TYPE_CHECKING:
    from bridle.aici.client.process import RuntimeConfig as RuntimeConfig
    from bridle.aici.client.reference import WasmController as WasmController
    from bridle.aici.runner import Runner as Runner
else:
    __getattr__, __all__ = lazy_names(
        __name__, {"runner": "Runner", "client.process": "RuntimeConfig", "client.reference": "WasmController"}
    )
