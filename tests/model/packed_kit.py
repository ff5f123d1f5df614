"""Writes quantized checkpoints in each format that other programs write, and the weights that they represent."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bridle.cpu_kernels.linear import QuantizedLinear
from bridle.model.quantization.weights import Grouped
from bridle.model.quantize import Int8Linear
from tests.fakes import tiny_checkpoints

#: Tensors in place of a weight, and the weight that they stand for.
Packed = tuple[dict[str, Tensor], Tensor]
GROUP = 32
#: What codes of 4 bits stand for.
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def pack(values: Tensor, bits: int) -> Tensor:
    """Pack uint8 [..., n] into int32 [..., n * bits / 32], with the first value in the lowest bits."""
    per = 32 // bits
    words = torch.zeros(*values.shape[:-1], values.shape[-1] // per, dtype=torch.int64)
    for place in range(per):
        words |= values[..., place::per].long() << (bits * place)
    return (words - ((words >> 31) << 32)).to(torch.int32)


def rounded(weight: Tensor, bits: int, even: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Round a weight; return integers [out, in], and a zero point and a scale for each group of inputs."""
    runs = weight.view(weight.shape[0], -1, GROUP)
    top = (1 << bits) - 1
    if even:
        scale = (runs.abs().amax(-1) / (top // 2)).half().float()
        zero = torch.full_like(scale, (top + 1) // 2)
    else:
        low, high = runs.amin(-1).clamp_max(0), runs.amax(-1).clamp_min(0)
        scale = ((high - low) / top).half().float()
        zero = (-low / scale).round().clamp(0, top)
    integers = (runs / scale[..., None] + zero[..., None]).round().clamp(0, top)
    return integers.view_as(weight).to(torch.uint8), zero.to(torch.uint8), scale


def meant(integers: Tensor, zero: Tensor, scale: Tensor, index: Tensor | None = None) -> Tensor:
    index = torch.arange(integers.shape[1]) // GROUP if index is None else index
    return (integers.float() - zero.float()[:, index]) * scale[:, index]


def gptq(bits: int, even: bool, offset: int = 1, ordered: bool = False) -> Callable[[Tensor], Packed]:
    def make(weight: Tensor) -> Packed:
        index = torch.arange(weight.shape[1]) // GROUP
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0)) if ordered else None
        if order is not None:
            weight = weight[:, order]
        integers, zero, scale = rounded(weight, bits, even)
        if order is not None:  # inputs back in their places, each with its group
            back = order.argsort()
            integers, index = integers[:, back], index[back]
        stored = (zero.to(torch.int16) - offset) & ((1 << bits) - 1)
        tensors = {
            "qweight": pack(integers.t().contiguous().t(), bits).t().contiguous(),
            "qzeros": pack(stored.t().contiguous().to(torch.uint8), bits),
            "scales": scale.t().contiguous().half(),
            "g_idx": index.to(torch.int32),
        }
        return tensors, meant(integers, zero, scale, index)

    return make


def awq(weight: Tensor) -> Packed:
    integers, zero, scale = rounded(weight, 4, even=False)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def words(values: Tensor) -> Tensor:  # [n, out]
        return pack(values.reshape(values.shape[0], -1, 8)[..., order].flatten(1), 4)

    tensors = {"qweight": words(integers.t()), "qzeros": words(zero.t()), "scales": scale.t().contiguous().half()}
    return tensors, meant(integers, zero, scale)


def packed_integers(bits: int, even: bool, packed_zeros: bool = True) -> Callable[[Tensor], Packed]:
    def make(weight: Tensor) -> Packed:
        integers, zero, scale = rounded(weight, bits, even)
        tensors = {
            "weight_packed": pack(integers, bits),
            "weight_scale": scale.half(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not even:
            plain = (zero.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
            tensors["weight_zero_point"] = pack(zero.t().contiguous(), bits).t().contiguous() if packed_zeros else plain
        return tensors, meant(integers, zero, scale)

    return make


def int8(weight: Tensor) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 127
    integers = (weight / scale).round().to(torch.int8)
    return {"weight": integers, "weight_scale": scale}, integers.float() * scale


def fp8(scale_name: str, block: int | None, per_row: bool = False) -> Callable[[Tensor], Packed]:
    def make(weight: Tensor) -> Packed:
        if block is not None:
            tiles = weight.view(weight.shape[0] // block, block, weight.shape[1] // block, block)
            scale = tiles.abs().amax((1, 3)) / 448
            whole = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
        elif per_row:
            scale = whole = weight.abs().amax(1, keepdim=True) / 448
        else:
            scale = whole = weight.abs().amax() / 448
        small = (weight / whole).to(torch.float8_e4m3fn)
        return {"weight": small, scale_name: scale.contiguous()}, small.float() * whole

    return make


def nvfp4(is_modelopt: bool) -> Callable[[Tensor], Packed]:
    """Return a function that packs a weight into 4 bits, with a float8 scale for 16 inputs and one for the whole
    weight."""
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

    def make(weight: Tensor) -> Packed:
        runs = weight.view(weight.shape[0], -1, 16)
        whole = weight.abs().amax() / (6 * 448)
        scale = (runs.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
        step = (scale.float() * whole)[..., None]
        codes = ((runs / step).abs()[..., None] - levels).abs().argmin(-1).to(torch.uint8)
        meant = levels[codes.long()] * step * runs.sign()
        codes = codes | (runs < 0).to(torch.uint8) << 3
        packed = (codes[..., ::2] | codes[..., 1::2] << 4).flatten(1)
        if is_modelopt:
            return {"weight": packed, "weight_scale": scale, "weight_scale_2": whole}, meant.flatten(1)
        return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": 1 / whole[None]}, meant.flatten(
            1
        )

    return make


def compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
#: How it is made, what the configuration says, and the layer that it becomes with the numbers unchanged, if it does.
FORMATS: dict[str, tuple[Callable[[Tensor], Packed], dict[str, Any], type | None]] = {
    "gptq": (gptq(4, True), GPTQ, QuantizedLinear),
    "gptq asymmetric": (gptq(4, False), {**GPTQ, "sym": False}, None),
    "gptq v2": (gptq(4, True, 0), {**GPTQ, "checkpoint_format": "gptq_v2"}, QuantizedLinear),
    "gptq ordered": (gptq(4, True, ordered=True), {**GPTQ, "desc_act": True}, None),
    "gptq 8 bits": (gptq(8, True), {**GPTQ, "bits": 8}, None),
    "gptq 2 bits": (gptq(2, True), {**GPTQ, "bits": 2}, None),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, None),
    "packed": (packed_integers(4, True), compressed("pack-quantized", {"num_bits": 4}), QuantizedLinear),
    "packed asymmetric": (packed_integers(4, False), compressed("pack-quantized", {"num_bits": 4}), None),
    "packed, plain zeros": (packed_integers(4, False, False), compressed("pack-quantized", {"num_bits": 4}), None),
    "packed 8 bits": (packed_integers(8, True), compressed("pack-quantized", {"num_bits": 8}), None),
    "int8": (int8, compressed("int-quantized", {"num_bits": 8}), Int8Linear),
    "float8 of rows": (fp8("weight_scale", None, True), compressed("float-quantized", {"num_bits": 8}), None),
    "float8 of wholes": (fp8("weight_scale", None), {"quant_method": "fp8"}, None),
    "float8 of squares": (
        fp8("weight_scale_inv", 16),
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        None,
    ),
    "nvfp4": (nvfp4(False), compressed("nvfp4-pack-quantized", {"num_bits": 4, "group_size": 16}), None),
    "nvfp4 of modelopt": (nvfp4(True), {"quant_method": "modelopt", "quant_algo": "NVFP4"}, None),
    "float8 of compressed squares": (
        fp8("weight_scale", 16),
        compressed("float-quantized", {"num_bits": 8, "strategy": "block", "block_structure": [16, 16]}),
        None,
    ),
}


def make(name: str, folder: Path, family: str = "qwen2", **changes: Any) -> tuple[Path, Path]:
    """Return a packed checkpoint, and one with the same weights dequantized."""
    original = tiny_checkpoints.cached_checkpoint(
        family, **{"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, **changes}
    )
    return packed_and_plain(name, folder, original)


def packed_and_plain(name: str, folder: Path, original: Path) -> tuple[Path, Path]:
    """Write a checkpoint in a packed form, and a second one with the same weights dequantized."""
    pack_weight, config, _ = FORMATS[name]
    weights = load_file(original / "model.safetensors")
    tensors, stands_for = {}, {}
    for key, tensor in weights.items():
        if ("_proj.weight" in key or re.search(r"experts\.\d+\.w\d\.weight", key)) and "vision" not in key:
            made, value = pack_weight(tensor.float())
            tensors |= {key.removesuffix("weight") + part: one.contiguous() for part, one in made.items()}
            stands_for[key] = value.contiguous()
        else:
            tensors[key] = stands_for[key] = tensor
    return _written(folder, original, tensors, stands_for, config)


def _written(
    folder: Path, original: Path, tensors: dict[str, Tensor], stands_for: dict[str, Tensor], config: dict[str, Any]
) -> tuple[Path, Path]:
    packed, plain = folder / "packed", folder / "plain"
    for path, content in ((packed, tensors), (plain, stands_for)):
        shutil.copytree(original, path)
        save_file(content, path / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
    return packed, plain


def mxfp4(folder: Path, original: Path) -> tuple[Path, Path]:
    """Write gpt-oss in its published form: experts in 4 bits with a power of two as scale per 32 inputs. Also write it
    with the weights dequantized."""
    weights = load_file(original / "model.safetensors")
    tensors, stands_for = dict(weights), dict(weights)
    generator = torch.Generator().manual_seed(4)
    for key in [key for key in weights if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inputs, outputs = weights[key].shape
        codes = torch.randint(0, 16, (count, outputs, inputs // 32, 32), generator=generator).to(torch.uint8)
        scales = torch.randint(122, 126, (count, outputs, inputs // 32), generator=generator).to(torch.uint8)
        tensors[f"{key}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).contiguous()
        tensors[f"{key}_scales"] = scales
        del tensors[key]
        numbers = _FP4[codes.long()] * torch.exp2(scales.float() - 127)[..., None]
        stands_for[key] = numbers.flatten(2).mT.contiguous()
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return _written(folder, original, tensors, stands_for, config)


def deepseek_v4(folder: Path, original: Path) -> tuple[Path, Path]:
    """Write DeepSeek V4 in its published form: experts in 4 bits, attention in 8, scales that are powers of two. Names
    lack `model.`, and one layer predicts further tokens. Also write it with the weights dequantized."""
    weights = load_file(original / "model.safetensors")
    tensors, stands_for = {"mtp.0.e_proj.weight": torch.ones(2, 2)}, dict(weights)
    generator = torch.Generator().manual_seed(4)
    for key, tensor in weights.items():
        name = key.removeprefix("model.")
        if re.search(r"ffn\.experts\.", key):
            codes = torch.randint(0, 16, tensor.shape, generator=generator).to(torch.uint8)
            powers = torch.randint(122, 126, (len(tensor), tensor.shape[1] // 32), generator=generator)
            tensors[name] = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
            tensors[name.removesuffix("weight") + "scale"] = powers.to(torch.uint8).view(torch.float8_e8m0fnu)
            stands_for[key] = _FP4[codes.long()] * torch.exp2(powers - 127.0).repeat_interleave(32, 1)
        elif re.search(r"(attn|indexer|shared_experts)\.w\w+\.weight", key):
            tiles = tensor.unflatten(1, (-1, 16)).unflatten(0, (-1, 16))
            scale = torch.exp2(torch.log2(tiles.abs().amax((1, 3)) / 448).ceil())
            whole = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)
            tensors[name] = (tensor / whole).to(torch.float8_e4m3fn)
            tensors[name.removesuffix("weight") + "scale"] = scale.to(torch.float8_e8m0fnu)
            stands_for[key] = tensors[name].float() * whole
        else:
            tensors[name] = tensor
    config = {"quant_method": "fp8", "weight_block_size": [16, 16], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    return _written(folder, original, tensors, stands_for, config)


def random_weight(
    seed: int, form: int | str, num_outputs: int, num_inputs: int, group: int, has_zeros: bool, is_ordered: bool
) -> Grouped:
    """Return a random weight in groups of `group` inputs; the last group may have fewer."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.arange(num_inputs) // group
    if is_ordered:
        index = index[torch.randperm(num_inputs, generator=generator)]
    groups = int(index.max()) + 1
    scales = torch.rand(num_outputs, groups, generator=generator).half() + 0.1
    if form == "float8":
        values = torch.randn(num_outputs, num_inputs, generator=generator).to(torch.float8_e4m3fn)
        return Grouped(values, scales.float(), None, index, 8)
    bits = 8 if form == "int8" else int(form)
    top = 1 << bits
    values = torch.randint(0, top, (num_outputs, num_inputs), generator=generator).to(torch.uint8)
    zeros = torch.randint(0, top, (num_outputs, groups), generator=generator).to(torch.int16)
    if form == "int8":
        return Grouped(values.view(torch.int8), scales, zeros - 128 if has_zeros else None, index, 8)
    return Grouped(values, scales, zeros if has_zeros else torch.full_like(zeros, top // 2), index, bits)
