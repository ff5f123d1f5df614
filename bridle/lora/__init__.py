"""LoRA adapters: checks their untrusted files, decides which are in memory, and multiplies many in one batch.

The package knows nothing of requests, plans or models. Importing it loads no torch; only its modules that compute do.
"""

from __future__ import annotations

from bridle.lora.cache_policy import AdapterState, AdapterStatus
from bridle.lora.device import AdapterDevice, AdapterLimits, LayerShape, find_device, require_device
from bridle.lora.files import AdapterFiles, find_adapter, open_adapter
from bridle.lora.peft_config import LoraShape
from bridle.lora.pool import AdapterPool

__all__ = [
    "AdapterDevice",
    "AdapterFiles",
    "AdapterLimits",
    "AdapterPool",
    "AdapterState",
    "AdapterStatus",
    "LayerShape",
    "LoraShape",
    "find_adapter",
    "find_device",
    "open_adapter",
    "require_device",
]
