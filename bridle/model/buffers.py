"""Sets the buffers (constants) of a model that was created on torch's `meta` device: rotary frequencies, embedding
scales."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch

from bridle.errors import UnsupportedModel

#: An integer that no constant has.
_OPEN_NUMBER = -1


def fill_buffers(model: Any, given: Container[str] = ()) -> None:
    """Allocate the buffers of a model, and let the model's own code set all buffers except those named in `given`.
    Raises `UnsupportedModel` for a buffer that the model leaves undefined."""
    found = [
        (f"{path}.{name}", module, name)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    for _, module, name in found:
        buffer = module._buffers[name]
        open_value = torch.nan if buffer.is_floating_point() else _OPEN_NUMBER
        module._buffers[name] = torch.full_like(buffer, open_value, device="cpu")
    wanted = [(module, name) for path, module, name in found if path not in given]
    for module, path in {module: path for path, module, _ in found if path not in given}.items():
        _init_of(model, path.rpartition(".")[0])(module)
    if any(_is_open(module, name) for module, name in wanted):
        model.base_model._init_weights(model.base_model)  # some families set the buffers of layers in this call
    for module, name in wanted:
        if _is_open(module, name):
            raise UnsupportedModel(f"{type(module).__name__} has a constant {name!r} whose value is unknown")


def _init_of(model: Any, path: str) -> Callable[[Any], None]:
    """Return the method that sets the constants of a module: the module's own, or that of the nearest enclosing
    model."""
    while path:
        if (found := getattr(model.get_submodule(path), "_init_weights", None)) is not None:
            return found  # type: ignore[no-any-return]
        path = path.rpartition(".")[0]
    return model._init_weights  # type: ignore[no-any-return]


def _is_open(module: Any, name: str) -> bool:
    buffer = module._buffers[name]
    return bool((buffer.isnan() if buffer.is_floating_point() else buffer == _OPEN_NUMBER).any())
