"""The engine's side of the control runtime: starts it, talks to it, and applies its answers to sequences."""

from bridle.aici.client.policy_pool import PolicyPool
from bridle.aici.client.pool import RuntimePool
from bridle.aici.client.process import OWN_RUNTIME, RuntimeConfig, RuntimeProcess
from bridle.aici.client.reference import WasmController
from bridle.aici.client.side_channel import SideChannel

__all__ = [
    "PolicyPool",
    "OWN_RUNTIME",
    "RuntimeConfig",
    "RuntimePool",
    "RuntimeProcess",
    "SideChannel",
    "WasmController",
]
