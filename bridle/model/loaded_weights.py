"""The result of loading a model's weights, from which an executor is built; and the size of the weights in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from bridle.config import ModelConfig
from bridle.model.checkpoint import Checkpoint
from bridle.model.geometry import Geometry


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """A loaded and prepared model, from which an executor with a KV pool can be built."""

    config: ModelConfig
    checkpoint: Checkpoint
    model: nn.Module
    geometry: Geometry
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    key: str | None = None  # of the model cache's entry that the model was loaded from


def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes that the weights of a checkpoint take on `device`."""
    from bridle.model.quantization.on_device import keeps_bits

    is_cpu = device.type == "cpu"
    return checkpoint.weight_bytes(dtype.itemsize, keeps_blocks=is_cpu, keeps_codes=not is_cpu and keeps_bits(device))
