"""`bridle check`: loads a checkpoint as the engine would, and compares it with the eager attention of transformers and
with its quantized forms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from bridle.config import DType, ModelConfig
from bridle.errors import UnsupportedModel
from bridle.model import device_defaults, loader, support_checks
from bridle.model.checkpoint import inspect_checkpoint
from bridle.model.geometry import discover_geometry
from bridle.model.parity import ParityReport, compare_with_eager
from bridle.model.pooling.settings import read_pooling
from bridle.model.quality import MAX_TOKENS, Quality, measure_forms, read_tokens
from bridle.model.rope import fix_rotary_scaling


def check_model(
    path: str | Path,
    *,
    dtype: DType = "float32",
    device: str = "auto",
    kernel: str = "auto",
    quantization: str = "none",
    max_tokens: int = 96,
) -> ParityReport:
    """Load the checkpoint in folder `path` as the engine would, and compare it with the eager attention of
    transformers.

    `max_tokens` is the length of the longest trial sequence. Raises `UnsupportedModel` if the checkpoint cannot be
    loaded.
    """
    config = ModelConfig(model=str(path), dtype=dtype, device=device, kernel=kernel, quantization=quantization)  # type: ignore[arg-type]
    if read_pooling(Path(path)) is not None:
        raise UnsupportedModel(
            f"{path} is an embedding or classification model; bridle checks such models while it loads them"
        )
    checkpoint = inspect_checkpoint(Path(path))
    settings = support_checks.read_config(checkpoint)
    target = device_defaults.choose_device(device)
    model = loader.read_model(checkpoint, settings, device_defaults.choose_dtype(config, settings, target), target)
    max_model_len = support_checks.choose_max_model_len(settings, None)
    notes = fix_rotary_scaling(model, max_model_len)
    geometry = discover_geometry(model, support_checks.num_mixing_layers(settings), target)
    stays_stored = loader.came_quantized(model)  # the kernels round activations, so neither pass uses the kernels then
    if quantization != "none":
        loader.prepare_linears(model, config)  # both passes in the same integers

    def prepare() -> None:
        """Change the model as the engine's loader does. This is called after the eager pass and before the packed pass
        of the comparison."""
        loader.lower_model(model, discover_geometry(model, support_checks.num_mixing_layers(settings), target))
        if not stays_stored:
            loader.prepare_linears(model, config)

    longest = min(max_tokens, max_model_len)
    return compare_with_eager(
        model,
        geometry,
        target,
        kernel=kernel,
        max_tokens=longest,
        notes=tuple(notes),
        prepare=prepare,
        floats=stays_stored,
    )


def check_quality(path: Path, forms: Sequence[str], text: str) -> list[Quality]:
    """Return the quality loss of each quantized form in `forms`, compared with the checkpoint in folder `path` in
    float32 on this CPU."""
    device = torch.device("cpu")
    checkpoint = inspect_checkpoint(path)
    settings = support_checks.read_config(checkpoint)
    dtype = device_defaults.choose_dtype(ModelConfig(), settings, device)
    model = loader.read_model(checkpoint, settings, dtype, device)
    max_len = support_checks.choose_max_model_len(settings, None)
    fix_rotary_scaling(model, max_len)
    geometry = discover_geometry(model, support_checks.num_mixing_layers(settings), device)
    tokens = read_tokens(path, text, min(MAX_TOKENS, max_len))
    return list(measure_forms(model, geometry, device, forms, tokens))
