"""The engine's side of the control runtime: starts it, talks to it, and steers sequences by its answers."""

from bridle.aici.client.demanded import DemandedPool
from bridle.aici.client.pool import RuntimePool
from bridle.aici.client.process import OWN_RUNTIME, RuntimeConfig, RuntimeProcess
from bridle.aici.client.reference import WasmController
from bridle.aici.client.side import SideChannel

__all__ = [
    "DemandedPool",
    "OWN_RUNTIME",
    "RuntimeConfig",
    "RuntimePool",
    "RuntimeProcess",
    "SideChannel",
    "WasmController",
]
