"""Decodes quantized blocks to floats. `bridle.cpu_kernels` decodes the common block types, this module the older types,
and the `gguf` package the rare types.

Every type in this module stores some bits per value and one or two scales per block, in the layout of ggml. The input
is bytes [rows, bytes per row], and the output float32 [rows, values per row]. llama.cpp decodes blocks to the same
values.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from bridle.cpu_kernels.ggml import TYPES, dequantize
from bridle.distribution import install_hint
from bridle.errors import UnsupportedModel
from bridle.gguf.format import TYPES_BY_NAME


def decode_blocks(kind: str, rows: Tensor) -> Tensor:
    """Decode uint8 [R, bytes] of type `kind` to float32 [R, values]. Raises `UnsupportedModel` for types that cannot be
    decoded."""
    if kind in TYPES:
        return dequantize(TYPES[kind], rows)
    decode = _DECODERS.get(kind)
    if decode is None:
        return _decode_rare(kind, rows)
    blocks = rows.reshape(-1, TYPES_BY_NAME[kind].size)  # [B, bytes]
    return decode(blocks).reshape(rows.shape[0], -1)


#: Types that the `gguf` package decodes.
RARE = frozenset(
    {
        *("Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"),
        *("TQ1_0", "TQ2_0", "NVFP4"),
    }
)


def _decode_rare(kind: str, rows: Tensor) -> Tensor:
    if kind not in RARE:
        raise UnsupportedModel(f"tensor type {kind} holds no weights that bridle can use")
    if find_spec("gguf") is None:
        raise UnsupportedModel(f"weights of type {kind} need the extra: {install_hint('gguf')}")
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType[kind]))


def _half(pair: Tensor) -> Tensor:
    """Convert bytes [B, 2] of half precision to float32 [B, 1]."""
    return pair.contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Split bytes into 4-bit values: [B, ..., n] -> [B, ..., 2 n]. The low four bits of all bytes come first, then the
    high four bits."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _f32(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float32).clone()


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.bfloat16).float()


#: The values of the 16 codes of IQ4_NL.
_NONLINEAR = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)


def _integers_iq4_nl(blocks: Tensor) -> Tensor:
    """Decode bytes [B, 18] of IQ4_NL to int8 [B, 32]."""
    return _NONLINEAR[_nibbles(blocks[:, 2:]).int()]


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _integers_iq4_nl(blocks).float() * _half(blocks[:, :2])


#: The values of four-bit floats with a sign, an exponent of two bits and a mantissa bit, doubled.
_DOUBLED_FP4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)


def _split_mxfp4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Decode bytes [B, 17] to int8 [B, 32] and the exponents of their scales, int32 [B, 1]."""
    return _DOUBLED_FP4[_nibbles(blocks[:, 1:]).long()], blocks[:, :1].int() - 128


def _mxfp4(blocks: Tensor) -> Tensor:
    integers, exponents = _split_mxfp4(blocks)
    return torch.ldexp(integers.float(), exponents)


def exact_q8_0(kind: str, rows: Tensor) -> Tensor | None:
    """Return uint8 [R, bytes] of type `kind` as blocks of Q8_0 with exactly the same values; None if Q8_0 cannot
    represent them. The values of IQ4_NL and MXFP4 are integers with a scale. MXFP4 may fail, because half precision
    cannot represent all of its scales."""
    if kind == "IQ4_NL":
        blocks = rows.reshape(-1, 18)
        return _as_q8_0(blocks[:, :2], _integers_iq4_nl(blocks), rows)
    if kind != "MXFP4":
        return None
    integers, exponents = _split_mxfp4(rows.reshape(-1, 17))
    beyond = (exponents < -24) | (exponents > 15)
    if bool((beyond & integers.any(1, keepdim=True)).any()):
        return None
    scales = torch.where(beyond, 0.0, torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)).half()
    return _as_q8_0(scales.view(torch.uint8), integers, rows)


def _as_q8_0(scales: Tensor, integers: Tensor, rows: Tensor) -> Tensor:
    """Join half-precision scales [B, 2] and int8 values [B, 32] to blocks of Q8_0, with the same number of rows as
    `rows`."""
    return torch.cat((scales, integers.view(torch.uint8)), 1).reshape(rows.shape[0], -1)


_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _f32,
    "F16": _half,
    "BF16": _bf16,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
}
