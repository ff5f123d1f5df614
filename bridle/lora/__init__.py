"""LoRA adapters: their files, read with distrust; which of them are in memory; their products, many in one batch.

Knows nothing of requests, plans or models. Importing the package loads no torch; its modules that compute do.
"""

from __future__ import annotations

from bridle.lora.device import AdapterDevice, as_device
from bridle.lora.files import AdapterFiles, find_adapter, open_adapter
from bridle.lora.layers import AdapterLimits, LayerShape
from bridle.lora.peft_config import LoraShape
from bridle.lora.pool import AdapterPool
from bridle.lora.status import AdapterState, AdapterStatus

__all__ = [
    "AdapterDevice",
    "AdapterFiles",
    "AdapterLimits",
    "AdapterPool",
    "AdapterState",
    "AdapterStatus",
    "LayerShape",
    "LoraShape",
    "as_device",
    "find_adapter",
    "open_adapter",
]
