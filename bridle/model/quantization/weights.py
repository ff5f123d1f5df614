"""Converts the tensors that a quantization method stores for one linear layer to a weight. `read_grouped` returns
integers, zero points and scales, for kernels that support any combination of these. `read_weight` returns a format of
the CPU kernels. The CPU kernels support 8-bit integers with a scale per output, and 4-bit integers with zero point 8. A
group of 4-bit integers must have a multiple of 32 inputs. Every other weight becomes floating point, and the caller
rounds it to Q8_0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bridle.errors import UnsupportedModel
from bridle.model.quantization.schemes import Scheme

#: Tensors of a linear layer by the last part of their names.
Stored = Mapping[str, Tensor]

#: The values of NVFP4's 16 codes, doubled.
_FP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # positions of a word's outputs in the word
_GROUP = 32
_POWERS = torch.float8_e8m0fnu


@dataclass(frozen=True, slots=True)
class Grouped:
    """A weight whose values are `scale * (value - zero)`. `values` [out, in] are uint8 of `bits` bits, int8 or float8.
    `scales` are [out, groups]. `zeros` are int16 [out, groups], or None. `index` [in] is the group of each input."""

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    index: Tensor
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def number(self) -> Tensor:
        """Return the weight as float32 [out, in]."""
        if self.zeros is None:
            number = self.values.float()
        else:
            number = (self.values.to(torch.int16) - self.zeros[:, self.index]).float()
        return number.mul_(self.scales.float()[:, self.index])


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight in one of three forms: `number` [out, in] in float32; `integers` int8 [out, in] and `scale` [out]; or
    `blocks` of Q4_0."""

    number: Tensor | None = None
    integers: Tensor | None = None
    scale: Tensor | None = None
    blocks: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        if self.blocks is not None:
            return self.blocks.shape[0], self.blocks.shape[1] // 18 * _GROUP
        kept = self.number if self.number is not None else self.integers
        assert kept is not None
        return kept.shape[0], kept.shape[1]


def is_packed(stored: Stored) -> bool:
    """Return whether the tensors of a layer are those of a quantized layer."""
    weight = stored.get("weight")
    return bool({"qweight", "weight_packed"} & stored.keys()) or (weight is not None and weight.itemsize == 1)


def is_mxfp4(stored: Stored) -> bool:
    """Return whether the tensors of a layer are in MXFP4. In MXFP4, a byte has two values, and each 32 inputs have a
    power of two as their scale."""
    weight, scale = stored.get("weight"), stored.get("weight_scale_inv")
    return weight is not None and weight.dtype is torch.int8 and scale is not None and scale.dtype is _POWERS


def read_weight(name: str, stored: Stored, scheme: Scheme) -> Weight:
    """Return the weight that `stored` holds for layer `name`. If a form of the CPU kernels can represent the same
    values, the weight has this form. Raises `UnsupportedModel` if the tensors are inconsistent."""
    return _as_weight(read_grouped(name, stored, scheme))


def read_grouped(name: str, stored: Stored, scheme: Scheme) -> Grouped:
    """Return the weight that `stored` holds for layer `name`. Raises `UnsupportedModel` if the tensors are
    inconsistent."""
    try:
        if {"weight_global_scale", "weight_scale_2"} & stored.keys():
            return _read_fp4(stored)
        if "qweight" in stored:
            return (_read_awq if scheme.method == "awq" else _read_gptq)(stored, scheme)
        if "weight_packed" in stored:
            return _read_packed(stored, scheme)
        return _read_scaled(stored, scheme)
    except (KeyError, RuntimeError, ValueError, IndexError) as error:
        raise UnsupportedModel(
            f"the packed weight of {name!r} cannot be read: {type(error).__name__}: {error}"
        ) from error


# -- words of 32 bits ------------------------------------------------------------------------------------------------


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack the values in words, the lowest bits first: int32 [..., n] -> uint8 [..., n * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    fields = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return fields.to(torch.uint8).flatten(-2)


def _read_awq(stored: Stored, scheme: Scheme) -> Grouped:
    """Read AWQ's tensors. A word packs neighbouring outputs in AWQ's own order. Each group and output has a zero
    point."""
    order = torch.tensor(_AWQ_ORDER, device=stored["qweight"].device)
    integers, zeros = (
        unpack(stored[name], 4).view(stored[name].shape[0], -1, 8)[..., order].flatten(1)
        for name in ("qweight", "qzeros")
    )  # [in, out], [groups, out]
    return _grouped(integers.t(), zeros.t(), stored["scales"].t(), None, 4)


def _read_gptq(stored: Stored, scheme: Scheme) -> Grouped:
    """Read GPTQ's tensors. A word packs neighbouring inputs; zero points are packed along the outputs. With activation
    order, the file has the group of each input."""
    integers = unpack(stored["qweight"].t().contiguous(), scheme.bits)  # [out, in]
    zeros = unpack(stored["qzeros"], scheme.bits).t().to(torch.int16) + scheme.zero_offset  # [out, groups]
    zeros = zeros & ((1 << scheme.bits) - 1) if scheme.zero_offset else zeros
    return _grouped(integers, zeros, stored["scales"].t(), stored.get("g_idx"), scheme.bits)


def _read_packed(stored: Stored, scheme: Scheme) -> Grouped:
    """Read the tensors of compressed-tensors. A word packs neighbouring inputs. Values are shifted by half of their
    range."""
    num_outputs, num_inputs = (int(side) for side in stored["weight_shape"])
    words = stored["weight_packed"]
    bits = next((bits for bits in (4, 8, 2) if words.shape[1] == -(-num_inputs * bits // 32)), 0)
    if not bits:
        raise ValueError(f"packed words of shape {tuple(words.shape)} are not {num_outputs} x {num_inputs} weights")
    integers = unpack(words, bits)[:, :num_inputs]
    half = 1 << (bits - 1)
    zeros = torch.full(stored["weight_scale"].shape, half, dtype=torch.int16, device=words.device)
    if "weight_zero_point" in stored:
        points = stored["weight_zero_point"]
        if points.dtype is torch.int32:  # packed along the outputs
            points = unpack(points.t().contiguous(), bits).t()[:num_outputs].to(torch.int16)
        else:
            points = points.to(torch.int16) + half
        zeros = points
    return _grouped(integers, zeros, stored["weight_scale"], stored.get("weight_g_idx"), bits)


def _grouped(integers: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor | None, bits: int) -> Grouped:
    """Return the weight `scale * (integer - zero)`, from integers [out, in] and from zeros and scales [out, groups]."""
    num_groups = scales.shape[1]
    plain = _evenly(integers.shape[1], num_groups, integers.device)
    index = plain if group_of is None or bool((group_of < 0).any()) else group_of.long()
    if bool((index >= num_groups).any()) or zeros.shape != scales.shape:
        raise ValueError(f"{num_groups} scale groups do not fit {integers.shape[1]} inputs")
    return Grouped(integers, scales, zeros.to(torch.int16), index, bits)


def _evenly(num_inputs: int, num_groups: int, device: torch.device) -> Tensor:
    """Return the group of each input, for groups of consecutive inputs that have equal length."""
    return torch.arange(num_inputs, device=device) // -(-num_inputs // num_groups)


def _as_weight(grouped: Grouped) -> Weight:
    if grouped.values.dtype is torch.int8 and grouped.zeros is None and grouped.scales.shape[1] == 1:
        return Weight(integers=grouped.values.contiguous(), scale=grouped.scales[:, 0].float().contiguous())
    blocks = _as_blocks(grouped)
    return Weight(number=grouped.number()) if blocks is None else Weight(blocks=blocks)


def _as_blocks(grouped: Grouped) -> Tensor | None:
    """Return the same weight as blocks of Q4_0, [out, bytes]; None if Q4_0 cannot represent its values."""
    integers, scales = grouped.values, grouped.scales
    half, size = scales.to(torch.float16), -(-integers.shape[1] // scales.shape[1])
    is_even = size % _GROUP == 0 and integers.shape[1] == size * scales.shape[1]
    if not is_even or not torch.equal(grouped.index, _evenly(integers.shape[1], scales.shape[1], integers.device)):
        return None
    if grouped.zeros is None or bool((grouped.zeros != 8).any()) or bool((integers > 15).any()):
        return None
    if not torch.equal(half.float(), scales.float()):
        return None
    runs = integers.reshape(integers.shape[0], -1, _GROUP)  # [out, blocks, 32]
    nibbles = runs[..., :16] | (runs[..., 16:] << 4)
    wide = half.repeat_interleave(size // _GROUP, 1).unsqueeze(-1)  # [out, blocks, 1]
    return torch.cat((wide.contiguous().view(torch.uint8), nibbles), -1).flatten(1)


# -- a number of 8 bits for each weight --------------------------------------------------------------------------------


def _read_scaled(stored: Stored, scheme: Scheme) -> Grouped:
    """Read int8 or float8 values. There is one scale for the whole weight, or one per output, per group of inputs, or
    per block."""
    weight = stored["weight"]
    scale = stored["weight_scale_inv" if "weight_scale_inv" in stored else "weight_scale"]
    scales = _by_groups(scale.float() if scale.dtype is _POWERS else scale, weight, scheme)
    zeros = stored.get("weight_zero_point")
    if zeros is not None and bool((zeros != 0).any()):
        zeros = _by_groups(zeros, weight, scheme).to(torch.int16)
        zeros = zeros.expand(scales.shape)  # one zero point for all groups, or one for each
    else:
        zeros = None
    return Grouped(weight, scales, zeros, _group_index(scales, weight, scheme), 8)


def _read_fp4(stored: Stored) -> Grouped:
    """Read NVFP4's tensors. A byte packs two neighbouring values. Groups have scales in float8. The weight also has a
    single scale for all values, which is a factor or a divisor."""
    packed = stored["weight_packed" if "weight_packed" in stored else "weight"]
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)  # [out, in]
    values = torch.tensor(_FP4_DOUBLED, dtype=torch.int8, device=packed.device)[codes.long()]
    divisor = stored.get("weight_global_scale")
    whole = stored["weight_scale_2"].float() if divisor is None else 1 / divisor.float()
    scales = stored["weight_scale"].float() * (whole.reshape(()) / 2)
    if scales.dim() != 2 or scales.shape[0] != values.shape[0] or values.shape[1] % scales.shape[1]:
        raise ValueError(f"scales of shape {tuple(scales.shape)} do not fit a weight of {tuple(values.shape)}")
    return Grouped(values, scales, None, _evenly(values.shape[1], scales.shape[1], values.device), 8)


def _by_groups(scale: Tensor, weight: Tensor, scheme: Scheme) -> Tensor:
    """Convert stored scales to [out, groups], for a weight [out, in]. The shape of `scale` determines which outputs and
    inputs a scale belongs to."""
    rows, columns = weight.shape
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(rows, 1)
    if scale.dim() == 1:
        scale = scale[:, None]
    if _are_squares(scale, weight, scheme):
        assert scheme.block is not None
        return scale.repeat_interleave(scheme.block[0], 0)[:rows]
    if scale.shape[0] != rows or columns % scale.shape[1]:
        raise ValueError(f"scales of shape {tuple(scale.shape)} do not fit a weight of {rows} x {columns}")
    return scale


def _are_squares(scale: Tensor, weight: Tensor, scheme: Scheme) -> bool:
    block, (rows, columns) = scheme.block, weight.shape
    return block is not None and scale.shape == (-(-rows // block[0]), -(-columns // block[1]))


def _group_index(scales: Tensor, weight: Tensor, scheme: Scheme) -> Tensor:
    """Return the group of each input. The last block of a row may have fewer inputs than other blocks."""
    num_inputs, num_groups = weight.shape[1], scales.shape[1]
    if scheme.block is not None and num_groups == -(-num_inputs // scheme.block[1]):
        return torch.arange(num_inputs, device=weight.device) // scheme.block[1]
    return _evenly(num_inputs, num_groups, weight.device)
