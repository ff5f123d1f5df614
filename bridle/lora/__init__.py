"""LoRA adapters: their files, read with distrust; which of them are in memory; their products, many in one batch.

Knows nothing of requests, plans or models. Importing the package loads no torch; `weights`, `layout` and `product` do.
"""

from __future__ import annotations

from bridle.lora.files import AdapterFiles, find_adapter, open_adapter
from bridle.lora.peft_config import LoraShape

__all__ = ["AdapterFiles", "LoraShape", "find_adapter", "open_adapter"]
