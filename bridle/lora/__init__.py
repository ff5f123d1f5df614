"""LoRA adapters: checks their untrusted files, decides which adapters are in memory, and applies many adapters in one
batch. The package is independent of requests, plans and models. Importing the package does not import torch; its
modules with tensors do.
"""

from bridle.lora.cache_policy import AdapterState as AdapterState
from bridle.lora.cache_policy import AdapterStatus as AdapterStatus
from bridle.lora.device import AdapterDevice as AdapterDevice
from bridle.lora.device import AdapterLimits as AdapterLimits
from bridle.lora.device import LayerShape as LayerShape
from bridle.lora.device import find_device as find_device
from bridle.lora.device import require_device as require_device
from bridle.lora.files import AdapterFiles as AdapterFiles
from bridle.lora.files import find_adapter as find_adapter
from bridle.lora.files import open_adapter as open_adapter
from bridle.lora.peft_config import LoraShape as LoraShape
from bridle.lora.pool import AdapterPool as AdapterPool
