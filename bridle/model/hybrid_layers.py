"""Describes decoder layers to the C kernels, for models with recurrent layers: LFM2, Qwen3.5, Qwen3-Next, Nemotron-H,
Granite 4 H, Bamba, Falcon-H1, Jamba and families with the same layers.

The names of a layer's submodules determine its kind. A part that the kernels do not support, such as a mixture of
experts, is computed by its module of transformers. A description is used only after a comparison with transformers
(`bridle.model.hybrid_model`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bridle.cpu_kernels.kernels import Kernels, Matrix
from bridle.cpu_kernels.layers import ALONE, KEEPS, READS, Heads, Layer
from bridle.cpu_kernels.linear import NativeWeight
from bridle.cpu_kernels.mixers import Mixer
from bridle.cpu_kernels.packing import pack_float32
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.gguf_matrix import ReorderedInputs
from bridle.model.hybrid_mixers import CannotDescribe, delta_net, mamba, mamba2, norm_weight, reordered, taps_of
from bridle.model.linear import MIN_NATIVE_SIZE
from bridle.model.native_step import Parts

#: Names that families give to the norms of a layer.
_NORMS = (
    *(("input_layernorm", "post_attention_layernorm"), ("input_layernorm", "pre_ff_layernorm")),
    *(("operator_norm", "ffn_norm"), ("norm", "norm")),
)
_MIXERS = ("linear_attn", "conv", "self_attn", "mamba")
_NETWORKS = ("mlp", "feed_forward", "shared_mlp")
#: Names of the factors of a mixer's inputs and outputs, in layers or mixers that have such factors.
_MULTIPLIERS = {
    "mamba": ("ssm_in_multiplier", "ssm_out_multiplier"),
    "self_attn": ("attention_in_multiplier", "attn_out_multiplier"),
}
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("input_linear", "output_linear"))
_DELTAS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("in_proj_qkvz", "in_proj_ba")
_SILU, _RELU2 = ("SiLU", "SiLUActivation"), ("ReLUSquaredActivation",)

#: A function of rows: [T, hidden] -> [T, hidden].
Network = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class HybridLayer:
    """The description of a layer for the kernels, and its linear layers `parts`. `network` is the layer's second half
    (its MLP) if transformers computes it. The results of the linear layers `inner` are used inside a mixer, so adapters
    cannot change them."""

    layer: Layer
    parts: Parts
    network: Network | None = None
    inner: Sequence[Any] = ()


def heads_of(geometry: Geometry) -> Heads:
    """Return the heads of all attention layers. Raises `CannotDescribe` if layers have different heads, or need
    operations that the kernels lack."""
    kinds = {(layer.num_heads, layer.num_kv_heads, layer.key_dim) for layer in geometry.layers.values()}
    if len(kinds) != 1 or any(_is_special(layer) for layer in geometry.layers.values()):
        raise CannotDescribe("layers with different or special attention are not supported")
    return Heads(*kinds.pop())


def _is_special(layer: LayerGeometry) -> bool:
    return layer.key_dim != layer.value_dim or layer.has_softcap or layer.has_sinks


class LayerReader:
    """Describes the layers of one model. Converts small matrices to the order of the kernels; large matrices must have
    been converted before."""

    def __init__(self, geometry: Geometry, found: Kernels, is_rotated: bool) -> None:
        self._geometry, self._found, self._is_rotated = geometry, found, is_rotated
        self.heads = heads_of(geometry)

    def read(self, layer: Any) -> list[HybridLayer]:
        """Describe a layer. If several mixers read the same hidden states, return one description per mixer, in the
        order of the mixers. Raises `CannotDescribe`."""
        names = next((pair for pair in _NORMS if all(hasattr(layer, name) for name in pair)), None)
        if names is None:
            raise CannotDescribe(f"{type(layer).__name__} has no norms under known names")
        first, second = (getattr(layer, name) for name in names)
        mixers, network = [name for name in _MIXERS if getattr(layer, name, None) is not None], _part(layer, _NETWORKS)
        if not mixers:  # the layer has only one half
            alone = getattr(layer, "mixer", None)
            if hasattr(alone, "in_proj") or hasattr(alone, "q_proj"):
                mixers = ["mixer"]
            else:
                network = alone
        if not mixers and network is None:
            raise CannotDescribe(f"{type(layer).__name__} has no mixer under a known name")
        if len(mixers) < 2:
            return [self._read(layer, mixers, first, network, second)]
        places = [KEEPS, *[READS] * (len(mixers) - 1)]
        beside = [self._read(layer, [name], first, None, second, at) for name, at in zip(mixers, places, strict=True)]
        return [*beside, self._read(layer, [], first, network, second)]

    def _read(
        self, layer: Any, mixers: Sequence[str], norm: nn.Module, network: Any, second: nn.Module, beside: int = ALONE
    ) -> HybridLayer:
        """Describe a layer with at most one mixer, named in `mixers`, after `norm`, and an MLP `network` after the norm
        `second`."""
        fields: dict[str, Any] = dict.fromkeys(("out", "down", "norm", "mlp_norm", "head_norm"))
        fields |= {"qkv": (), "gate_up": (), "eps": 0.0, "mlp_eps": 0.0, "activation": "silu", "beside": beside}
        fields["share"] = _number("residual_multiplier", layer)
        parts: list[Sequence[Any]] = [(), ()]
        for name in mixers:
            mixer = getattr(layer, name)
            parts = [*self._mixer(mixer, fields)]
            fields["norm"], fields["eps"] = norm_weight(norm)
            given, gives = _MULTIPLIERS.get(name, ("", ""))
            fields["share"] *= _number(gives, layer)
            fields["factors"] = _factors(mixer, parts[0], _number(given, layer, mixer))
        experts = None if beside else getattr(layer, "block_sparse_moe", None)
        if experts is None:
            parts += self._network(network, second, fields)
        else:
            parts += [(), ()]
            fields["network"] = _library_part((experts, network), second, fields["share"])
        network, inner = fields.pop("network", None), fields.pop("inner", ())
        return HybridLayer(_layer(fields), tuple(parts), network, inner)  # type: ignore[arg-type]

    # -- first halves ----------------------------------------------------------------------------------------------

    def _mixer(self, module: Any, fields: dict[str, Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the linear layers before and after a mixer, and write the mixer's properties to `fields`."""
        delta = next((names for names in _DELTAS if all(hasattr(module, name) for name in names)), None)
        if hasattr(module, "q_proj"):
            first = self._attention(module, fields)
        elif delta is not None and hasattr(module, "conv1d") and hasattr(module, "A_log"):
            first, fields["mixer"] = [getattr(module, name) for name in delta], delta_net(module)
        elif hasattr(module, "A_log") and hasattr(module, "n_groups"):
            first, fields["mixer"] = [module.in_proj], mamba2(module)
        elif hasattr(module, "A_log") and hasattr(module, "x_proj"):
            first, fields["inner"] = [module.in_proj], (module.x_proj, module.dt_proj)
            fields["mixer"] = mamba(module, [self._matrix(each) for each in fields["inner"]])
        elif isinstance(getattr(module, "conv", None), nn.Conv1d) and not hasattr(module, "A_log"):
            first, fields["mixer"] = [module.in_proj], Mixer("short_convolution", *taps_of(module.conv))
        else:
            raise CannotDescribe(f"the recurrence of {type(module).__name__} is not supported")
        last = getattr(module, "o_proj", None) or module.out_proj
        if isinstance(last, ReorderedInputs):  # of GGUF files
            fields["mixer"], last = reordered(fields.get("mixer"), last), last.linear
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
        fields["share"] *= _number("down_multiplier", module)
        if hasattr(module, "gate_multiplier"):
            widths = [each.out_features for each in found[:-1]]
            fields["factors"] = torch.ones(sum(widths))
            fields["factors"][: widths[0]] = float(module.gate_multiplier)
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
            raise CannotDescribe(f"the weight of {type(module).__name__} is not a float32 matrix")
        if weight.numel() >= MIN_NATIVE_SIZE:
            raise CannotDescribe("a large weight is not in the order of the kernels")
        return NativeWeight(self._found, pack_float32(weight, self._found.lanes), module.bias).matrix


def _layer(fields: dict[str, Any]) -> Layer:
    defaults: dict[str, Any] = {"rotation": 0, "scale": 1.0, "window": None, "head_eps": 0.0}
    fixed: dict[str, Any] = dict.fromkeys(("last_norm", "mlp_last_norm", "softcap", "sinks"))
    return Layer(**{**defaults, **fixed, "is_norm_of_all_heads": False, **fields})


def _part(module: Any, names: Sequence[str]) -> Any:
    """Return the first submodule that has one of `names`; None if there is none."""
    return next((part for name in names if (part := getattr(module, name, None)) is not None), None)


def _number(name: str, *owners: Any) -> float:
    """Return the attribute `name` of the first of `owners` that has it, as a float; 1 if no owner has it."""
    return next((float(getattr(owner, name)) for owner in owners if hasattr(owner, name)), 1.0)


def _factors(mixer: Any, first: Sequence[Any], given: float) -> Tensor | None:
    """Return the factors for the outputs of the linear layers `first` before a mixer; None if all factors are 1.
    `given` is the factor by which the layer's inputs are multiplied."""
    if given != 1.0 and any(getattr(each, "bias", None) is not None for each in first):
        raise CannotDescribe("a bias is not scaled like its layer's inputs")
    widths = [each.out_features for each in first]
    factors = torch.full((sum(widths),), given)
    if hasattr(mixer, "mup_vector"):
        factors *= mixer.mup_vector.detach().float().flatten()
    if hasattr(mixer, "key_multiplier"):
        factors[widths[0] : sum(widths[:2])] *= float(mixer.key_multiplier)
    return None if bool((factors == 1.0).all()) else factors


def _library_part(modules: Sequence[Any], norm: nn.Module, share: float) -> Network:
    """Return a function that applies several modules to the same normalized rows. The function returns the sum of the
    modules' results, times `share`."""

    def compute(rows: Tensor) -> Tensor:
        normed = norm(rows).unsqueeze(0)
        found = [module(normed) for module in modules]
        parts = [each[0] if isinstance(each, tuple) else each for each in found]
        out: Tensor = sum(parts[1:], parts[0])
        return out.view(rows.shape) * share

    return compute
