"""Reads a packed checkpoint into the model class of transformers. As with GGUF files, the model is created without
memory and filled layer by layer. So only one layer at a time is in memory twice, in the file's form and in the new
form."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from bridle.cpu_kernels.linear import QuantizedLinear
from bridle.errors import UnsupportedModel
from bridle.model import attention
from bridle.model.buffers import fill_buffers
from bridle.model.checkpoint import Checkpoint, weight_files
from bridle.model.language_model import LanguageModel, attention_names
from bridle.model.quantization.experts import has_packed_form, make_experts, make_mxfp4_experts, mxfp4_layer
from bridle.model.quantization.on_device import DeviceForms
from bridle.model.quantization.schemes import Scheme, read_scheme
from bridle.model.quantization.weights import Weight, is_mxfp4, is_packed, read_grouped, read_weight
from bridle.model.quantize import Int8Linear, is_worthwhile
from bridle.model.staging import Put, move_model, staged
from bridle.model.support_checks import takes_media
from bridle.model.weight_reading import making_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Suffixes of tensors that describe how activations or the KV cache were rounded; bridle does not round these.
_IGNORED = (
    "input_scale",
    "input_zero_point",
    "k_scale",
    "v_scale",
    "q_scale",
    "output_scale",
    "activation_scale_ub",
    "activation_scale",
)


def read_packed_model(
    checkpoint: Checkpoint,
    settings: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None] = lambda share: None,
) -> nn.Module:
    """Return the model of a packed checkpoint. The model's matrices stay packed, or become floats of type `dtype` if no
    kernels support them. Raises `UnsupportedModel` if a tensor is missing, unused, or of another shape."""
    scheme = read_scheme(settings.quantization_config)
    attention.register()
    model = _empty_model(settings, dtype)
    fill_buffers(model)
    with ExitStack() as stack:
        files = _Files(stack, checkpoint, model)
        make = _maker(scheme, dtype, device, stack.enter_context(staged(device)))
        for name, module in list(model.named_modules()):
            if has_packed_form(module) and not files.has(f"{name}.down_proj"):
                _put(model, name, _read_experts(name, module, files, make, dtype, device))
                continue
            stored = files.take(name) if isinstance(module, nn.Linear) else {}
            if is_packed(stored) and type(module) is not nn.Linear:  # the module computes by its own code
                stored = {"weight": read_grouped(name, stored, scheme).number()}
            if is_packed(stored):
                _put(model, name, make(name, stored, module))
            else:
                _fill(model, name, module, stored, files, dtype)
            progress(1 - files.num_bytes / max(checkpoint.num_bytes, 1))
        files.check_empty(model)
    model.requires_grad_(False)
    model = move_model(model.eval(), device)
    return LanguageModel(model) if takes_media(settings) else model


def _empty_model(settings: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """Create the model of transformers for a configuration, with bridle's attention and without memory for weights."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    plain = type(settings).from_dict({k: v for k, v in settings.to_dict().items() if k != "quantization_config"})
    kind: Any = AutoModelForMultimodalLM if takes_media(settings) else AutoModelForCausalLM
    names = attention_names(plain) if takes_media(settings) else attention.ATTENTION_NAME
    with making_model, torch.device("meta"):
        return kind.from_config(plain, attn_implementation=names, dtype=dtype)


def _read_experts(
    name: str, module: Any, files: _Files, make: Maker, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    def layer(name: str, linear: nn.Linear) -> nn.Module:
        stored = files.take(name)
        if is_mxfp4(stored):
            blocks, scales = stored["weight"].view(torch.uint8), stored["weight_scale_inv"].view(torch.uint8)
            shape = (linear.out_features, linear.in_features)
            _check_shape(f"{name}.weight", (blocks.shape[0], 2 * blocks.shape[1]), shape)
            _check_shape(f"{name}.scale", scales.shape, (shape[0], shape[1] // 32))
            return mxfp4_layer(blocks.view(*scales.shape, 16), scales, None, dtype, keeps_blocks=device.type == "cpu")
        if is_packed(stored):
            return make(name, stored, linear)
        if "weight" not in stored:
            raise UnsupportedModel(f"the checkpoint lacks weight '{name}.weight'")
        _check_shape(f"{name}.weight", stored["weight"].shape, tuple(linear.weight.shape))
        return _plain(stored["weight"].to(dtype), None)

    if files.has(f"{name}.down_proj_blocks"):
        return make_mxfp4_experts(name, module, files.take(name), dtype, keeps_blocks=device.type == "cpu")
    return make_experts(name, module, lambda part: files.has_any(f"{part}."), layer)


class _Files:
    """The tensors of a checkpoint by module, with the names that transformers uses. Each tensor can be read once."""

    def __init__(self, stack: ExitStack, checkpoint: Checkpoint, model: Any) -> None:
        self._folder = checkpoint.folder
        self._sizes, self.num_bytes = checkpoint.tensor_bytes, checkpoint.num_bytes  # of tensors that were not read yet
        self._homes: dict[str, tuple[Any, str]] = {}
        self._modules: dict[str, list[str]] = {}
        rename = _renaming(model, checkpoint.tensor_bytes)
        for path in weight_files(checkpoint.folder):
            file = stack.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118 - no dictionary
                self._homes[rename(name)] = file, name
        for name in self._homes:
            self._modules.setdefault(name.rpartition(".")[0], []).append(name)

    def has(self, name: str) -> bool:
        return name in self._homes

    def has_any(self, prefix: str) -> bool:
        return prefix.removesuffix(".") in self._modules

    def take(self, module: str) -> dict[str, Tensor]:
        """Read all tensors of a module, and return them by the last part of their names."""
        names = [name for name in self._modules.get(module, ()) if name in self._homes]
        return {name.rpartition(".")[2]: self._pop(name) for name in names}

    def take_one(self, name: str) -> Tensor | None:
        return self._pop(name) if name in self._homes else None

    def _pop(self, name: str) -> Tensor:
        file, own = self._homes.pop(name)
        self.num_bytes -= self._sizes[own]
        tensor: Tensor = file.get_tensor(own)
        return tensor

    def check_empty(self, model: Any) -> None:
        """Raise `UnsupportedModel` if there are tensors that no module has read. Tensors that transformers also ignores
        are no error."""
        left = sorted(name for name in self._homes if not name.endswith((*_IGNORED, "inv_freq", "lm_head.weight")))
        without = model._keys_to_ignore_on_load_unexpected or ()
        left = [name for name in left if not any(re.search(pattern, name) for pattern in without)]
        if left:
            raise UnsupportedModel(
                f"{self._folder} holds weights that {type(model).__name__} does not use, such as {left[0]!r}"
            )


def _renaming(model: Any, stored: Container[str]) -> Callable[[str], str]:
    """Return a function that converts a tensor's name in the files to its name in transformers. Some checkpoints have
    older names, or names of a model without an output head. Scales of weights in `stored` may be named `.scale`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    steps = [step for step in get_model_conversion_mapping(model) if isinstance(step, WeightRenaming)]

    def rename(name: str) -> str:
        layer = name.removesuffix(".scale")
        if layer != name and f"{layer}.weight" in stored:
            name = f"{layer}.weight_scale_inv"
        for step in steps:
            name, _ = step.rename_source_key(name)
        first = name.partition(".")[0]
        is_within = not hasattr(model, first) and hasattr(model.base_model, first)
        return f"{model.base_model_prefix}.{name}" if is_within else name

    return rename


def _fill(
    model: Any, name: str, module: nn.Module, stored: dict[str, Tensor], files: _Files, dtype: torch.dtype
) -> None:
    """Set the parameters of a module that are stored in floating point."""
    for field, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        full = f"{name}.{field}" if name else field
        if full == "lm_head.weight" and model.config.tie_word_embeddings:
            module._parameters[field] = model.get_input_embeddings().weight
            continue
        tensor = stored.get(field) if stored else files.take_one(full)
        if tensor is None:
            raise UnsupportedModel(f"the checkpoint lacks weight {full!r} of {type(model).__name__}")
        _check_shape(full, tuple(tensor.shape), tuple(parameter.shape))
        module._parameters[field] = nn.Parameter(tensor.to(dtype), requires_grad=False)
    for field, buffer in module._buffers.items():
        tensor = files.take_one(f"{name}.{field}" if name else field)
        if tensor is not None and buffer is not None:
            _check_shape(f"{name}.{field}", tuple(tensor.shape), tuple(buffer.shape))
            module._buffers[field] = tensor.to(buffer.dtype)


#: Replaces the empty linear layer of a name by a layer that computes with the packed tensors stored for it.
Maker = Callable[[str, dict[str, Tensor], nn.Linear], nn.Module]


def _maker(scheme: Scheme, dtype: torch.dtype, device: torch.device, put: Put) -> Maker:
    """Return a function that makes linear layers on `device` from packed tensors. `put` moves a tensor to `device`."""
    if device.type == "cpu":
        return lambda name, stored, linear: _on_cpu(
            read_weight(name, stored, scheme), _bias_of(name, stored, linear, dtype), linear, name, dtype
        )
    forms = DeviceForms(device, dtype)

    def make(name: str, stored: dict[str, Tensor], linear: nn.Linear) -> nn.Module:
        there = {field: put(tensor) for field, tensor in stored.items()}
        weight, bias = read_grouped(name, there, scheme), _bias_of(name, there, linear, dtype)
        _check_shape(name, weight.shape, (linear.out_features, linear.in_features))
        made = forms.make(weight, bias)
        return _plain(weight.number().to(dtype), bias) if made is None else made

    return make


def _bias_of(name: str, stored: dict[str, Tensor], linear: nn.Linear, dtype: torch.dtype) -> Tensor | None:
    bias = stored.get("bias")
    if (bias is None) != (linear.bias is None):
        raise UnsupportedModel(f"layer {name!r} of the checkpoint must have {'a' if bias is None else 'no'} bias")
    return None if bias is None else bias.to(dtype)


def _on_cpu(weight: Weight, bias: Tensor | None, linear: nn.Linear, name: str, dtype: torch.dtype) -> nn.Module:
    """Return a layer for the CPU that computes with a packed weight."""
    shape = (linear.out_features, linear.in_features)
    _check_shape(name, weight.shape, shape)
    if weight.integers is not None and weight.scale is not None and is_worthwhile("int8"):
        return Int8Linear.from_integers(weight.integers, weight.scale, bias, dtype)
    if weight.blocks is not None:
        return QuantizedLinear.from_ggml("Q4_0", weight.blocks.numpy(), shape, bias, dtype)
    number = _number(weight).to(dtype)
    if weight.integers is None and shape[1] % 32 == 0:
        return QuantizedLinear.from_float(number, "Q8_0", bias)
    return _plain(number, bias)


def _plain(number: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer of floats [out, in]."""
    with torch.device("meta"):
        made = nn.Linear(number.shape[1], number.shape[0], bias=bias is not None)
    made.weight = nn.Parameter(number, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def _number(weight: Weight) -> Tensor:
    """Return the weight as float32 [out, in]."""
    if weight.number is not None:
        return weight.number
    assert weight.integers is not None and weight.scale is not None
    return weight.integers.float() * weight.scale[:, None]


def _put(model: Any, name: str, made: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, made)


def _check_shape(name: str, found: Iterable[int], wanted: tuple[int, ...]) -> None:
    if tuple(found) != wanted:
        raise UnsupportedModel(f"weight {name!r} has shape {tuple(found)}, but config.json implies {wanted}")
