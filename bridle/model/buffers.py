"""The constants of a model that was made without memory: frequencies of positions, scales of embeddings."""

from __future__ import annotations

from typing import Any

import torch

from bridle.errors import UnsupportedModel


def fill_buffers(model: Any) -> None:
    """Give them memory, and let the model set them. Raises `UnsupportedModel` for one that it leaves open."""
    for module in model.modules():
        empty = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in empty:
            module._buffers[name] = torch.full_like(module._buffers[name], torch.nan, device="cpu")
        if empty:
            model._init_weights(module)
        for name in empty:
            if bool(module._buffers[name].isnan().any()):
                raise UnsupportedModel(f"{type(module).__name__} has a constant {name!r} of an unknown value")
