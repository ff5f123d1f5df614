"""Reads the weights of a vision tower from a GGUF file (`mmproj`), as floats, into the modules of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bridle.errors import UnsupportedModel
from bridle.gguf import GgufModel
from bridle.gguf.dequantize import decode_blocks
from bridle.gguf.vision import deepstack_layers, family_of, file_names

#: The only weight that files store with 1 added: the weight of a norm to which transformers adds 1.
_ONE_MORE = "mm_soft_emb_norm.weight"
_DEEPSTACK = "visual.deepstack_merger_list."


def fill_tower(whole: Any, text: nn.Module, tower: GgufModel, dtype: torch.dtype) -> None:
    """Set all parameters of `whole` except those of `text` from the file of the vision tower. Raises `UnsupportedModel`
    for a weight that is missing, unused, or of another shape."""
    family, inner = family_of(tower), whole.model
    own = {id(parameter) for parameter in text.parameters()}
    unused = set(tower.tensors)
    for path, module in inner.named_modules():
        for field, parameter in list(module._parameters.items()):
            if parameter is None or id(parameter) in own:
                continue
            name = f"{path}.{field}"
            files = file_names(family, _spelled(name, tower), tower)
            numbers = _shaped([_decode(tower, file) for file in files], tuple(parameter.shape), name, tower)
            numbers = numbers - 1 if name.endswith(_ONE_MORE) else numbers
            module._parameters[field] = nn.Parameter(numbers.to(dtype), requires_grad=False)
            unused.difference_update(files)
    if unused:
        raise UnsupportedModel(f"{tower.path} holds tensors that are not used, such as {sorted(unused)[0]!r}")


def _spelled(name: str, tower: GgufModel) -> str:
    """Return a weight's name with the layer number that files use. In transformers, layers that feed the text part
    (DeepStack) are counted separately."""
    if not name.startswith(_DEEPSTACK):
        return name
    number, _, rest = name.removeprefix(_DEEPSTACK).partition(".")
    return f"visual.deepstack.{deepstack_layers(tower)[int(number)]}.{rest}"


def _decode(tower: GgufModel, file: str) -> Tensor:
    entry = tower.tensors[file]
    rows = torch.from_numpy(tower.read(file))
    return decode_blocks(entry.kind.name, rows).view(entry.shape)


def _shaped(parts: list[Tensor], shape: tuple[int, ...], name: str, tower: GgufModel) -> Tensor:
    """Join the parts to one weight of shape `shape`. Parts of a convolution over time are stacked, other parts
    concatenated."""
    found = parts[0]
    if len(shape) == 5:
        found = torch.stack(parts, 2) if len(parts) > 1 else found.unsqueeze(2)
    elif len(parts) > 1:
        found = torch.cat(parts)
    if tuple(found.shape) != shape:
        raise UnsupportedModel(
            f"{tower.path}: weight {name!r} has shape {tuple(found.shape)}, but its metadata implies {shape}"
        )
    return found
