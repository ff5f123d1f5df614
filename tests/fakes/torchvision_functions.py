"""The torchvision functions that transformers' image processors call, written in plain torch. They serve environments
without torchvision, because each torchvision build requires one torch build."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bridle.multimodal import MediaReader


class InterpolationMode(enum.Enum):
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


def resize(image: Tensor, size: Sequence[int], interpolation: InterpolationMode, antialias: bool = True) -> Tensor:
    """Resize images of bytes, [N, C, H, W], to `size` (height, width)."""
    mode = interpolation.value
    found = torch.nn.functional.interpolate(image.float(), tuple(size), mode=mode, antialias=antialias)
    return found.round().clamp(0, 255).to(image.dtype)


def pad(image: Tensor, padding: Sequence[int], fill: float = 0, padding_mode: str = "constant") -> Tensor:
    left, top, right, bottom = padding
    return torch.nn.functional.pad(image, (left, right, top, bottom), padding_mode, fill)


def normalize(image: Tensor, mean: Any, std: Any, inplace: bool = False) -> Tensor:
    values = [torch.as_tensor(value, dtype=image.dtype).view(-1, 1, 1) for value in (mean, std)]
    return (image - values[0]) / values[1]


#: Families whose image processors the library has for torchvision alone.
FAMILIES = frozenset({"cohere2_vision", "kimi_k25", "lfm2_vl"})


def provide_processor(family: str, reader: MediaReader) -> None:
    """Let `reader` read images for a checkpoint of `family` that needs torchvision, if torchvision is not installed."""
    if family in FAMILIES and importlib.util.find_spec("torchvision") is None:
        sense: Any = reader.senses["image"]
        sense._processor = _processor_of(family, reader.folder)


def _processor_of(family: str, folder: Path) -> Any:
    """Return transformers' image processor of a checkpoint of `family`, based on the functions of this module."""
    from PIL.Image import Resampling
    from transformers import image_processing_backends as backends

    functional = sys.modules[__name__]
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    modules[names[-1]].functional = modules[f"{names[-1]}.functional"] = functional
    backends.tvF = functional
    modes = {Resampling.BILINEAR: InterpolationMode.BILINEAR, Resampling.BICUBIC: InterpolationMode.BICUBIC}
    backends.pil_torch_interpolation_mapping = modes
    with mock.patch.dict(sys.modules, modules):
        module = importlib.import_module(f"transformers.models.{family}.image_processing_{family}")
    settings = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
    return getattr(module, settings.pop("image_processor_type"))(**settings)
