"""The engine's side of the control runtime: starts the runtime, talks to it, and applies its answers to sequences."""

from bridle.aici.client.policy_pool import PolicyPool as PolicyPool
from bridle.aici.client.pool import RuntimePool as RuntimePool
from bridle.aici.client.process import OWN_RUNTIME as OWN_RUNTIME
from bridle.aici.client.process import RuntimeConfig as RuntimeConfig
from bridle.aici.client.process import RuntimeProcess as RuntimeProcess
from bridle.aici.client.reference import WasmController as WasmController
from bridle.aici.client.side_channel import SideChannel as SideChannel
