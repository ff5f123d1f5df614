"""Loads the model of a `ModelConfig` in stages: find, inspect, read, check, and prepare its weights. Each stage raises
an error with the reason if it refuses the model. Code in a checkpoint is never executed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from bridle.config import ModelConfig, Quantization
from bridle.errors import InvalidRequest, UnsupportedModel
from bridle.gguf import GgufModel
from bridle.load_progress import Report, part_of
from bridle.model import attention, memory, support_checks, tensor_parallel
from bridle.model.checkpoint import Checkpoint, inspect_checkpoint
from bridle.model.dense_layer import are_lean, lower_layers
from bridle.model.device_defaults import check_quantization, choose_device, choose_dtype, choose_threads
from bridle.model.geometry import Geometry, discover_geometry
from bridle.model.hub_lookup import folder_of
from bridle.model.language_model import LanguageModel, read_language_model
from bridle.model.linear import pack_linears, use_kernels
from bridle.model.loaded_weights import LoadedWeights, weight_bytes
from bridle.model.model_cache import load_kept
from bridle.model.own_attention import LIBRARY_ATTENTION, lead_to_bridle
from bridle.model.parity import compare_with_eager
from bridle.model.rope import fix_rotary_scaling
from bridle.model.staging import move_model
from bridle.model.weight_reading import read_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def load_weights(config: ModelConfig, report: Report) -> LoadedWeights:
    """Find, inspect, read, check and prepare a model. `report(what, share)` is called with the name of the current
    stage and the progress of loading from 0 to 1."""
    device = choose_device(config.device)
    choose_threads(config.num_threads)
    check_quantization(config.quantization, device)
    if config.quantization != "none" and tensor_parallel.num_ranks() > 1:
        raise InvalidRequest(f"quantization {config.quantization!r} needs one process; set shards to 1", "quantization")
    report("finding the model", 0.0)
    folder = folder_of(config, lambda share: report("downloading", share))
    kept = load_kept(config, folder)
    if kept is not None:
        report("using cached packed weights", 0.95)
        return kept
    checkpoint = inspect_checkpoint(folder)
    settings = support_checks.serving_config(checkpoint)
    dtype = choose_dtype(config, settings, device)
    support_checks.choose_max_model_len(settings, config.max_model_len)  # refused before weights are read
    num_ranks = tensor_parallel.num_ranks()
    plan = tensor_parallel.read_plan(settings, num_ranks) if num_ranks > 1 else None
    needed = weight_bytes(checkpoint, dtype, device)
    if plan is not None and device.type != "cpu":  # a GPU shard has its device to itself
        needed = int(needed * tensor_parallel.share_of_bytes(checkpoint.tensor_bytes, plan, num_ranks))
    memory.check_weights_fit(needed, dtype.itemsize, device)
    report("reading weights", 0.05)
    home = device if plan is None else torch.device("cpu")  # for shards: a GPU then gets its part from the CPU
    model = read_model(
        checkpoint, settings, dtype, home, lambda share: report("reading weights", part_of(0.05, 0.7, share))
    )
    return prepare_model(config, checkpoint, settings, model, dtype, device, plan, report)


def prepare_model(
    config: ModelConfig,
    checkpoint: Checkpoint,
    settings: PreTrainedConfig,
    model: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    plan: dict[str, str] | None = None,
    report: Report = lambda what, share: None,
) -> LoadedWeights:
    """Check and prepare a model whose weights were read or generated. The checkpoint's files are not changed."""
    max_model_len = support_checks.choose_max_model_len(settings, config.max_model_len)
    fix_rotary_scaling(model, max_model_len)
    if plan is not None:
        tensor_parallel.split_model(model, plan)
        move_model(model, device)
        if isinstance(model, LanguageModel):
            move_model(model.inner, device)
    report("checking the attention layers", 0.7)
    geometry = discover_geometry(model, support_checks.num_mixing_layers(settings), device)
    _check_unknown_family(model, settings, geometry, device)
    if plan is None or device.type != "cpu":
        with tensor_parallel.unsummed():
            lower_model(model, geometry)
    if plan is None:  # quantized weights cannot be split over processes
        if config.quantization == "auto":
            report("choosing the form of weights", 0.72)
            config = replace(config, quantization=choose_quantization(model, geometry, device, checkpoint.folder))
        prepare_linears(model, config, lambda share: report("packing weights", part_of(0.75, 0.95, share)))
    return LoadedWeights(config, checkpoint, model, geometry, dtype, device, max_model_len)


def read_model(
    checkpoint: Checkpoint,
    settings: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None] = lambda share: None,
) -> nn.Module:
    """Read the weights into the model class of transformers, with bridle's attention. Every weight must be in the
    checkpoint. `progress` gets the share of the weights' bytes that was read."""
    return lead_to_bridle(_read_model(checkpoint, settings, dtype, device, progress))


def _read_model(
    checkpoint: Checkpoint,
    settings: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None],
) -> nn.Module:
    if checkpoint.gguf is not None:
        return _read_gguf(checkpoint.gguf, checkpoint.tower, settings, dtype, device, progress)
    if getattr(settings, "quantization_config", None) is not None:
        return _read_packed(checkpoint, settings, dtype, device, progress)
    from transformers import AutoModelForCausalLM

    if support_checks.takes_media(settings):
        return read_language_model(checkpoint, settings, dtype, device, progress)
    name = LIBRARY_ATTENTION.get(settings.model_type, attention.ATTENTION_NAME)
    return read_weights(
        AutoModelForCausalLM, checkpoint, settings, dtype, device, attention_names=name, progress=progress
    )


def _read_gguf(
    source: GgufModel,
    tower: GgufModel | None,
    settings: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None],
) -> nn.Module:
    from bridle.model.gguf_model import read_gguf_model

    if tensor_parallel.num_ranks() > 1:
        raise InvalidRequest(
            "shards: a GGUF file is served by one process, because packed blocks cannot be split; use replicas",
            "model",
        )
    return read_gguf_model(source, settings, dtype, device, progress, tower)


def _read_packed(
    checkpoint: Checkpoint,
    settings: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None],
) -> nn.Module:
    from bridle.model.quantization.weight_reading import read_packed_model

    if tensor_parallel.num_ranks() > 1:
        raise InvalidRequest("a quantized checkpoint needs the whole model in one process; set shards to 1", "model")
    return read_packed_model(checkpoint, settings, dtype, device, progress)


def lower_model(model: nn.Module, geometry: Geometry) -> None:
    """Replace layers by equivalent lean layers, which need less Python code on a CPU and fewer kernel launches on a
    GPU."""
    lower_layers(model, geometry)


def choose_quantization(model: nn.Module, geometry: Geometry, device: torch.device, folder: Path) -> Quantization:
    """Return the quantization that `auto` selects for this model. On a GPU, and for weights that the checkpoint stores
    quantized, `auto` selects `none`."""
    from bridle.model.quality import choose_form

    if device.type != "cpu" or came_quantized(model):
        return "none"
    form: Quantization = choose_form(model, geometry, device, folder)  # type: ignore[assignment]
    return form


def came_quantized(model: nn.Module) -> bool:
    """Return whether a model has weights that the checkpoint stores quantized. The model must not have been quantized
    by bridle after its weights were read."""
    from bridle.cpu_kernels.linear import QuantizedLinear
    from bridle.model.float8 import Float8Linear
    from bridle.model.quantization.code_linear import CodeLinear
    from bridle.model.quantize import Int8Linear

    kinds = (QuantizedLinear, Int8Linear, CodeLinear, Float8Linear)
    return any(isinstance(module, kinds) for module in model.modules())


def prepare_linears(model: nn.Module, config: ModelConfig, progress: Callable[[float], None] | None = None) -> None:
    """Convert the linear layers to their fastest form for this machine, quantized if requested and not slower."""
    from bridle.model.quantize import is_worthwhile, prepare_quantized, quantize_linears

    prepare_quantized(model)
    if config.quantization == "fp8":
        from bridle.model.float8 import use_float8

        weight = model.get_input_embeddings().weight  # type: ignore[operator]
        use_float8(model, weight.device, weight.dtype)
    elif config.quantization not in ("none", "auto") and is_worthwhile(config.quantization):
        quantize_linears(model, config.quantization, progress)
    else:
        told = progress or (lambda share: None)
        use_kernels(model, are_lean(model), lambda share: told(0.5 * share))
        pack_linears(model, lambda share: told(0.5 + 0.5 * share))


def _check_unknown_family(
    model: nn.Module, settings: PreTrainedConfig, geometry: Geometry, device: torch.device
) -> None:
    """Unless the model's family is in the list of tested families, compare its results with the eager attention of
    transformers. Raises `UnsupportedModel` if the results differ."""
    if support_checks.is_compared(settings):
        return
    report = compare_with_eager(model, geometry, device, max_tokens=64, floats=came_quantized(model))
    if not report.is_equal:
        raise UnsupportedModel(
            f"model type {settings.model_type!r} would give wrong results: its packed pass differs from its own "
            f"attention by {report.max_error:.3g} (limit {report.tolerance:.3g})"
        )
