"""The constants of a model that was made without memory: frequencies of positions, scales of embeddings."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch

from bridle.errors import UnsupportedModel


def fill_buffers(model: Any, given: Container[str] = ()) -> None:
    """Give them memory, and let the model set all but those with names in `given`. Raises `UnsupportedModel` for one
    that it leaves open."""
    found = [
        (f"{path}.{name}", module, name)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    for _, module, name in found:
        module._buffers[name] = torch.full_like(module._buffers[name], torch.nan, device="cpu")
    wanted = [(module, name) for path, module, name in found if path not in given]
    for module in dict.fromkeys(module for module, _ in wanted):
        getattr(module, "_init_weights", model._init_weights)(module)
    if any(_is_open(module, name) for module, name in wanted):
        model.base_model._init_weights(model.base_model)  # which sets those of its layers in some families
    for module, name in wanted:
        if _is_open(module, name):
            raise UnsupportedModel(f"{type(module).__name__} has a constant {name!r} of an unknown value")


def _is_open(module: Any, name: str) -> bool:
    return bool(module._buffers[name].isnan().any())
