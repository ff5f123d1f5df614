"""A packed checkpoint in the library's own model class: made without memory, then filled layer by layer, as GGUF files
are, so that no weight is ever in memory as floating point beside its packed form for longer than its own turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
from bridle.model.quantization.on_device import DeviceForms
from bridle.model.quantization.schemes import Scheme, read_scheme
from bridle.model.quantization.weights import Weight, is_packed, read_grouped, read_weight
from bridle.model.quantize import Int8Linear, is_worthwhile
from bridle.model.staging import Put, move_model, staged

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Tensors beside weights that say how activations or the KV cache were rounded; here they are not.
_IGNORED = ("input_scale", "input_zero_point", "k_scale", "v_scale", "q_scale", "output_scale", "activation_scale_ub")


def read_packed_model(
    checkpoint: Checkpoint,
    settings: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None] = lambda share: None,
) -> nn.Module:
    """The model of a packed checkpoint, its matrices in few bits, or where no kernels fit as numbers of type `dtype`.
    Raises `UnsupportedModel` if something is missing, left over, or does not fit."""
    from transformers import AutoModelForCausalLM

    scheme = read_scheme(settings.quantization_config)
    attention.register()
    plain = type(settings).from_dict({k: v for k, v in settings.to_dict().items() if k != "quantization_config"})
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(plain, attn_implementation=attention.ATTENTION_NAME, dtype=dtype)
    fill_buffers(model)
    with ExitStack() as stack:
        files = _Files(stack, checkpoint)
        make = _maker(scheme, dtype, device, stack.enter_context(staged(device)))
        for name, module in list(model.named_modules()):
            stored = files.take(name) if isinstance(module, nn.Linear) else {}
            if is_packed(stored):
                _put(model, name, make(name, stored, module))
            else:
                _fill(model, name, module, stored, files, dtype)
            progress(1 - files.num_bytes / max(checkpoint.num_bytes, 1))
        files.check_empty(type(model).__name__)
    model.requires_grad_(False)
    return move_model(model.eval(), device)  # type: ignore[no-any-return]


class _Files:
    """The tensors of a checkpoint by module, each taken once."""

    def __init__(self, stack: ExitStack, checkpoint: Checkpoint) -> None:
        self._folder = checkpoint.folder
        self._sizes, self.num_bytes = checkpoint.tensor_bytes, checkpoint.num_bytes  # of what is not taken yet
        self._homes: dict[str, Any] = {}
        for path in weight_files(checkpoint.folder):
            file = stack.enter_context(safe_open(path, framework="pt"))
            self._homes |= dict.fromkeys(file.keys(), file)

    def take(self, module: str) -> dict[str, Tensor]:
        """All tensors of a module, by the rest of their names."""
        prefix = f"{module}."
        names = [name for name in self._homes if name.startswith(prefix) and "." not in name[len(prefix) :]]
        return {name[len(prefix) :]: self._pop(name).get_tensor(name) for name in names}

    def take_one(self, name: str) -> Tensor | None:
        return self._pop(name).get_tensor(name) if name in self._homes else None

    def _pop(self, name: str) -> Any:
        self.num_bytes -= self._sizes[name]
        return self._homes.pop(name)

    def check_empty(self, model: str) -> None:
        left = sorted(name for name in self._homes if not name.endswith((*_IGNORED, "inv_freq", "lm_head.weight")))
        if left:
            raise UnsupportedModel(
                f"{self._folder} holds weights that {model} has no place for, among them {left[0]!r}"
            )


def _fill(
    model: Any, name: str, module: nn.Module, stored: dict[str, Tensor], files: _Files, dtype: torch.dtype
) -> None:
    """Tensors in floating point, as they are."""
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


#: Makes the layer of a name that computes with the packed tensors stored for it, in the place of an empty one.
Maker = Callable[[str, dict[str, Tensor], nn.Linear], nn.Module]


def _maker(scheme: Scheme, dtype: torch.dtype, device: torch.device, put: Put) -> Maker:
    """Return a function that makes the layers of a model on `device`; `put` moves tensors there."""
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
        raise UnsupportedModel(f"layer {name!r} {'lacks its' if bias is None else 'has a'} bias")
    return None if bias is None else bias.to(dtype)


def _on_cpu(weight: Weight, bias: Tensor | None, linear: nn.Linear, name: str, dtype: torch.dtype) -> nn.Module:
    """The layer that computes with a packed weight."""
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
    """A layer of numbers [out, in]."""
    with torch.device("meta"):
        made = nn.Linear(number.shape[1], number.shape[0], bias=bias is not None)
    made.weight = nn.Parameter(number, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def _number(weight: Weight) -> Tensor:
    """float32 [out, in]"""
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
