"""The constants of a model that was made without memory: frequencies of positions, scales of embeddings."""

from __future__ import annotations

from typing import Any

import torch

from bridle.errors import UnsupportedModel


def fill_buffers(model: Any) -> None:
    """Give them memory, and let the model set them. Raises `UnsupportedModel` for one that it leaves open."""
    found = [
        (module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    for module, name in found:
        module._buffers[name] = torch.full_like(module._buffers[name], torch.nan, device="cpu")
    for module in dict.fromkeys(module for module, _ in found):
        model._init_weights(module)
    if any(_is_open(module, name) for module, name in found):
        model._init_weights(model.base_model)  # which sets those of its layers in some families
    for module, name in found:
        if _is_open(module, name):
            raise UnsupportedModel(f"{type(module).__name__} has a constant {name!r} of an unknown value")


def _is_open(module: Any, name: str) -> bool:
    return bool(module._buffers[name].isnan().any())
