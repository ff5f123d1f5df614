"""Descriptions of decoder layers for the native kernels, of models that have recurrent ones: LFM2, Qwen3.5,
Nemotron-H, Granite 4 H, Bamba and families with the same layers.

A layer is found by the names of its parts. What the kernels lack, such as a mixture of experts, stays a module of the
library. A description is used only after a trial (`bridle.model.hybrid_model`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bridle.cpu_kernels.kernels import Kernels, Matrix
from bridle.cpu_kernels.layers import Heads, Layer
from bridle.cpu_kernels.linear import NativeWeight
from bridle.cpu_kernels.mixers import Mixer
from bridle.cpu_kernels.packing import pack_float32
from bridle.model.dense_layer import is_close
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.gguf_matrix import ReorderedInputs
from bridle.model.linear import MIN_NATIVE_SIZE
from bridle.model.native_step import Parts

#: Names that families give to the parts of a layer.
_NORMS = (
    *(("input_layernorm", "post_attention_layernorm"), ("input_layernorm", "pre_ff_layernorm")),
    *(("operator_norm", "ffn_norm"), ("norm", "norm")),
)
_MIXERS = ("linear_attn", "conv", "self_attn", "mamba")
_NETWORKS = ("mlp", "feed_forward", "shared_mlp")
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("input_linear", "output_linear"))
_DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_SILU, _RELU2 = ("SiLU", "SiLUActivation"), ("ReLUSquaredActivation",)

#: Rows [T, hidden] -> what they get, [T, hidden].
Network = Callable[[Tensor], Tensor]


class CannotDescribe(Exception):
    """A layer has a part that kernels do not compute."""


@dataclass(frozen=True, slots=True)
class HybridLayer:
    """A layer for the kernels, its linear layers, and the half that is computed by the library behind it."""

    layer: Layer
    parts: Parts
    network: Network | None = None


def heads_of(geometry: Geometry) -> Heads:
    """The heads of all attention layers. Raises `CannotDescribe` if they differ or need what kernels lack."""
    kinds = {(layer.num_heads, layer.num_kv_heads, layer.key_dim) for layer in geometry.layers.values()}
    if len(kinds) != 1 or any(_is_special(layer) for layer in geometry.layers.values()):
        raise CannotDescribe("several kinds of attention")
    return Heads(*kinds.pop())


def _is_special(layer: LayerGeometry) -> bool:
    return layer.key_dim != layer.value_dim or layer.has_softcap or layer.has_sinks


class LayerReader:
    """Reads the layers of one model. Small matrices that the kernels do not have yet are kept in their order too."""

    def __init__(self, geometry: Geometry, found: Kernels, is_rotated: bool) -> None:
        self._geometry, self._found, self._is_rotated = geometry, found, is_rotated
        self.heads = heads_of(geometry)

    def read(self, layer: Any) -> HybridLayer:
        """Raises `CannotDescribe`."""
        names = next((pair for pair in _NORMS if all(hasattr(layer, name) for name in pair)), None)
        if names is None:
            raise CannotDescribe(f"{type(layer).__name__}: no norms under known names")
        first, second = (getattr(layer, name) for name in names)
        mixer, network = _part(layer, _MIXERS), _part(layer, _NETWORKS)
        if mixer is None:  # one half alone
            mixer = getattr(layer, "mixer", None)
            if not hasattr(mixer, "in_proj") and not hasattr(mixer, "q_proj"):
                mixer, network = None, mixer
        if mixer is None and network is None:
            raise CannotDescribe(f"{type(layer).__name__}: no mixer under a known name")
        fields: dict[str, Any] = dict.fromkeys(("out", "down", "norm", "mlp_norm", "head_norm"))
        fields |= {"qkv": (), "gate_up": (), "eps": 0.0, "mlp_eps": 0.0, "activation": "silu"}
        fields["share"] = float(getattr(layer, "residual_multiplier", 1.0))
        parts: list[Sequence[Any]] = [(), ()]
        if mixer is not None:
            parts = [*self._mixer(mixer, fields)]
            fields["norm"], fields["eps"] = norm_weight(first)
        experts = getattr(layer, "block_sparse_moe", None)
        if experts is None:
            parts += self._network(network, second, fields)
        else:
            parts += [(), ()]
            fields["network"] = _library_part((experts, network), second, fields["share"])
        return HybridLayer(_layer(fields), tuple(parts), fields.get("network"))  # type: ignore[arg-type]

    # -- first halves ----------------------------------------------------------------------------------------------

    def _mixer(self, module: Any, fields: dict[str, Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Its linear layers; what is known of them goes into `fields`."""
        if hasattr(module, "q_proj"):
            first = self._attention(module, fields)
        elif all(hasattr(module, name) for name in (*_DELTA, "conv1d", "A_log")):
            first, fields["mixer"] = [getattr(module, name) for name in _DELTA], delta_net(module)
        elif hasattr(module, "A_log") and hasattr(getattr(module, "norm", None), "group_size"):
            first, fields["mixer"] = [module.in_proj], mamba2(module)
        elif isinstance(getattr(module, "conv", None), nn.Conv1d) and not hasattr(module, "A_log"):
            first, fields["mixer"] = [module.in_proj], Mixer("short_convolution", *_taps(module.conv))
        else:
            raise CannotDescribe(f"{type(module).__name__}: another recurrence")
        last = getattr(module, "o_proj", None) or module.out_proj
        if isinstance(last, ReorderedInputs):  # of GGUF files
            fields["mixer"], last = _reordered(fields.get("mixer"), last), last.linear
        fields["qkv"], fields["out"] = [self._matrix(each) for each in first], self._matrix(last)
        return first, [last]

    def _attention(self, module: Any, fields: dict[str, Any]) -> list[Any]:
        heads, shape = self.heads, self._geometry.layers[module.layer_idx]
        fields["has_gate"] = module.q_proj.out_features == 2 * heads.heads * heads.dim
        fields["window"], fields["scale"] = shape.window, float(module.scaling)
        fields["rotation"] = int(self._is_rotated)
        for queries, keys in (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm")):
            if hasattr(module, queries):
                (weight, eps), (other, _) = (norm_weight(getattr(module, name)) for name in (queries, keys))
                joined = [weight.expand(heads.heads, -1), other.expand(heads.kv_heads, -1)]
                fields["head_norm"], fields["head_eps"] = torch.cat(joined).contiguous(), eps
        return [module.q_proj, module.k_proj, module.v_proj]

    # -- second halves ---------------------------------------------------------------------------------------------

    def _network(self, module: Any, norm: nn.Module, fields: dict[str, Any]) -> list[Sequence[Any]]:
        if module is None:
            return [(), ()]
        activation = type(_part(module, ("act_fn", "activation")) or nn.SiLU()).__name__
        names = next((each for each in _GATED if all(hasattr(module, name) for name in each)), None)
        if activation in _RELU2 and hasattr(module, "up_proj"):
            names = ("up_proj", "down_proj")
        elif activation not in _SILU:
            names = None
        found = None if names is None else [getattr(module, name) for name in names]
        if found is None or not all(isinstance(each, nn.Module) for each in found):
            fields["network"] = _library_part((module,), norm, fields["share"])
            return [(), ()]
        fields["activation"] = "relu2" if activation in _RELU2 else "silu"
        fields["gate_up"], fields["down"] = [self._matrix(each) for each in found[:-1]], self._matrix(found[-1])
        fields["mlp_norm"], fields["mlp_eps"] = norm_weight(norm)
        return [found[:-1], found[-1:]]

    def _matrix(self, module: Any) -> Matrix:
        native = getattr(module, "native", None)
        if isinstance(native, NativeWeight):
            return native.matrix
        weight = getattr(module, "weight", None)
        if type(module) is not nn.Linear or not isinstance(weight, Tensor) or weight.dtype is not torch.float32:
            raise CannotDescribe(f"a weight of {type(module).__name__}")
        if weight.numel() >= MIN_NATIVE_SIZE:
            raise CannotDescribe("a large weight in another order")
        return NativeWeight(self._found, pack_float32(weight, self._found.lanes), module.bias).matrix


def _layer(fields: dict[str, Any]) -> Layer:
    known = {name: value for name, value in fields.items() if name != "network"}
    defaults: dict[str, Any] = {"rotation": 0, "scale": 1.0, "window": None, "head_eps": 0.0}
    fixed: dict[str, Any] = dict.fromkeys(("last_norm", "mlp_last_norm", "softcap", "sinks"))
    return Layer(**{**defaults, **fixed, "is_norm_of_all_heads": False, **known})


def _part(module: Any, names: Sequence[str]) -> Any:
    """The part of a module that has one of `names`; None if there is none."""
    return next((part for name in names if (part := getattr(module, name, None)) is not None), None)


def _library_part(modules: Sequence[Any], norm: nn.Module, share: float) -> Network:
    """The sum of what modules make of the same rows, times `share`."""

    def compute(rows: Tensor) -> Tensor:
        normed = norm(rows).unsqueeze(0)
        found = [module(normed) for module in modules]
        parts = [each[0] if isinstance(each, tuple) else each for each in found]
        out: Tensor = sum(parts[1:], parts[0])
        return out.view(rows.shape) * share

    return compute


def norm_weight(norm: Any) -> tuple[Tensor, float]:
    """The weight of an RMS norm, which the module may add to 1, and its epsilon. Raises `CannotDescribe` if it is
    another norm."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
    if isinstance(weight, Tensor) and weight.dim() == 1 and isinstance(eps, float):
        rows = torch.randn(2, len(weight), generator=torch.Generator().manual_seed(0))
        normed = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)
        with torch.inference_mode():
            want = norm(rows)
        for each in (weight.detach().float(), weight.detach().float() + 1.0):
            if is_close(want, normed * each):
                return each.contiguous(), eps
    raise CannotDescribe(f"a norm {type(norm).__name__}")


def _reordered(mixer: Mixer | None, last: ReorderedInputs) -> Mixer:
    """A delta net whose heads' outputs go to other places, as the matrix behind it wants them."""
    if mixer is None or mixer.kind != "delta_net":
        raise CannotDescribe("columns in another order")
    blocks = last.inputs.view(mixer.heads, mixer.columns)  # of each place
    heads = blocks[:, 0] // mixer.columns
    if not torch.equal(blocks, heads[:, None] * mixer.columns + torch.arange(mixer.columns)):
        raise CannotDescribe("columns of heads in another order")
    return replace(mixer, places=heads.argsort().to(torch.int32))


# -- mixers ------------------------------------------------------------------------------------------------------------


def _taps(conv: Any) -> tuple[Tensor, Tensor | None]:
    return _floats(conv.weight.squeeze(1)), None if conv.bias is None else _floats(conv.bias)


def _floats(weight: Tensor) -> Tensor:
    return weight.detach().float().contiguous()


def _check_activation(module: Any) -> None:
    if module.activation not in ("silu", "swish"):
        raise CannotDescribe(f"an activation {module.activation!r}")


def delta_net(module: Any) -> Mixer:
    """Describe Qwen3.5's gated delta net."""
    _check_activation(module)
    return Mixer(
        "delta_net",
        *_taps(module.conv1d),
        *(int(module.num_k_heads), int(module.num_v_heads), int(module.head_k_dim), int(module.head_v_dim)),
        shift=_floats(module.dt_bias),
        fall=-_floats(module.A_log).exp(),
        norm=_floats(module.norm.weight),
        eps=float(module.norm.variance_epsilon),
    )


def mamba2(module: Any) -> Mixer:
    """Describe the mixer of Nemotron-H and others with Mamba 2."""
    _check_activation(module)
    heads, columns = int(module.num_heads), int(module.head_dim)
    if module.norm.group_size * module.n_groups != heads * columns:
        raise CannotDescribe(f"norms of {module.norm.group_size} values")
    least, most = module.time_step_limit
    return Mixer(
        "mamba2",
        *_taps(module.conv1d),
        *(int(module.n_groups), heads, int(module.ssm_state_size), columns),
        shift=_floats(module.dt_bias),
        fall=-_floats(module.A_log).exp(),
        skip=_floats(module.D),
        norm=_floats(module.norm.weight),
        eps=float(module.norm.variance_epsilon),
        limits=(float(least), float(most)),
    )
