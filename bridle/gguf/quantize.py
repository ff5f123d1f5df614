"""Quantizes values into packed blocks. The `gguf` package encodes the plain types, with the same bits as ggml. For the
K types, this module searches for the best scales by its own method. `tests/gguf/test_dequantize.py` compares the error
of K blocks with the resolution of their type.

The input is float32 [rows, values per row], and the output uint8 [rows, bytes per row].
"""

from __future__ import annotations

import torch
from torch import Tensor

from bridle.cpu_kernels.ggml import TYPES, quantize
from bridle.errors import InvalidRequest
from bridle.gguf.format import TYPES_BY_NAME

#: Maximum number of values that are processed at once, in whole rows; the search makes some dozen copies of them.
_MAX_NUMBERS = 1 << 21


def encode_blocks(kind: str, rows: Tensor) -> Tensor:
    """Encode float32 [R, values] as uint8 [R, bytes] of type `kind`."""
    if kind == "F32":
        return rows.contiguous().view(torch.uint8)
    if kind in ("F16", "BF16"):
        return rows.to(torch.float16 if kind == "F16" else torch.bfloat16).view(torch.uint8)
    if kind in ("Q8_0", "Q4_0"):
        return quantize(TYPES[kind], rows)
    if kind not in _ENCODERS:
        return _encode_plain(kind, rows)
    step = max(1, _MAX_NUMBERS // rows.shape[1])
    return torch.cat([_encode_part(kind, rows[at : at + step]) for at in range(0, rows.shape[0], step)])


def _encode_plain(kind: str, rows: Tensor) -> Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    try:
        return torch.from_numpy(quantize(rows.contiguous().numpy(), GGMLQuantizationType[kind]))
    except NotImplementedError:
        raise InvalidRequest(f"weights cannot be written as type {kind}", "type") from None


def _encode_part(kind: str, rows: Tensor) -> Tensor:
    blocks = rows.reshape(-1, TYPES_BY_NAME[kind].values)
    return _ENCODERS[kind](blocks).reshape(rows.shape[0], -1)


def _bytes(half: Tensor) -> Tensor:
    """Convert float [B, 1] to bytes [B, 2] of half precision."""
    return half.to(torch.float16).contiguous().view(torch.uint8)


def _safe(divisor: Tensor) -> Tensor:
    """Return `divisor`, with zeros replaced by ones."""
    return torch.where(divisor == 0, torch.ones_like(divisor), divisor)


# -- Q4_K and Q5_K: runs of 32 numbers, each with a scale and a minimum -------------------------------------


def _fit_runs(runs: Tensor, top: int, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the minimum with the least error, for runs [N, 32] of values in levels 0 to `top`. The
    minimum is at most 0, and is returned negated. The function rounds the values to levels of several spacings, and
    fits a line to each result by least squares."""
    weights = runs.abs() + runs.square().mean(-1, keepdim=True).sqrt()
    low = runs.amin(-1, keepdim=True).clamp_max(0)
    span = _safe(runs.amax(-1, keepdim=True) - low)
    best_scale, best_low = span / top, low
    best_loss = torch.full_like(span, torch.inf)
    for step in steps:
        levels = ((runs - low) * ((top + step) / span)).round().clamp(0, top)
        scale, base = _line_through(levels, runs, weights)
        loss = (weights * (scale * levels + base - runs).square()).sum(-1, keepdim=True)
        better = loss < best_loss
        best_loss = torch.where(better, loss, best_loss)
        best_scale, best_low = torch.where(better, scale, best_scale), torch.where(better, base, best_low)
    return best_scale, -best_low


def _line_through(levels: Tensor, runs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale, and the base of at most 0, for which `scale * levels + base` is closest to `runs` (weighted
    least squares)."""
    total = weights.sum(-1, keepdim=True)
    sum_l, sum_ll = (weights * levels).sum(-1, keepdim=True), (weights * levels * levels).sum(-1, keepdim=True)
    sum_x, sum_lx = (weights * runs).sum(-1, keepdim=True), (weights * levels * runs).sum(-1, keepdim=True)
    bottom = _safe(total * sum_ll - sum_l * sum_l)
    scale, base = (total * sum_lx - sum_l * sum_x) / bottom, (sum_ll * sum_x - sum_l * sum_lx) / bottom
    through_zero = sum_lx / _safe(sum_ll)
    return torch.where(base > 0, through_zero, scale), base.clamp_max(0)


def _k_levels(blocks: Tensor, top: int, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Encode blocks of values [B, 256] as block headers [B, 16], which hold the scales, and levels [B, 8, 32]."""
    runs = blocks.reshape(-1, 8, 32)
    scale, low = (part.reshape(-1, 8).clamp_min(0) for part in _fit_runs(runs.reshape(-1, 32), top, steps))
    wide_scale, wide_low = (part.amax(-1, keepdim=True) / 63 for part in (scale, low))  # [B, 1]
    scale6 = (scale / _safe(wide_scale)).round().clamp(0, 63).to(torch.uint8)
    low6 = (low / _safe(wide_low)).round().clamp(0, 63).to(torch.uint8)
    step = (wide_scale.half().float() * scale6).unsqueeze(-1)
    base = (wide_low.half().float() * low6).unsqueeze(-1)
    levels = ((runs + base) / _safe(step)).round().clamp(0, top)
    levels = torch.where(step == 0, torch.zeros_like(levels), levels).to(torch.uint8)
    packed = torch.cat(
        (
            scale6[:, :4] | ((scale6[:, 4:] >> 4) << 6),
            low6[:, :4] | ((low6[:, 4:] >> 4) << 6),
            (scale6[:, 4:] & 15) | ((low6[:, 4:] & 15) << 4),
        ),
        -1,
    )
    return torch.cat((_bytes(wide_scale), _bytes(wide_low), packed), -1), levels


def _pair_nibbles(levels: Tensor) -> Tensor:
    """Pack levels [B, 8, 32] below 16 to [B, 128]: even runs in the low four bits of bytes, odd runs in the high four
    bits."""
    pairs = levels.reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128)


def _q4_k(blocks: Tensor) -> Tensor:
    head, levels = _k_levels(blocks, 15, torch.arange(-1.0, 1.05, 0.1))
    return torch.cat((head, _pair_nibbles(levels)), -1)


def _q5_k(blocks: Tensor) -> Tensor:
    head, levels = _k_levels(blocks, 31, torch.arange(-0.5, 1.05, 0.1))
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = ((levels >> 4) << shifts).sum(1).to(torch.uint8)  # [B, 32]
    return torch.cat((head, fifth, _pair_nibbles(levels & 15)), -1)


# -- Q6_K: runs of 16 numbers, each with a signed scale ------------------------------------------------------


def _fit_signed(runs: Tensor) -> Tensor:
    """Return the scale with the least error for runs [N, 16] in levels -32 to 31."""
    weights = runs.square()
    at = runs.abs().argmax(-1, keepdim=True)
    peak = runs.gather(-1, at)
    best, best_gain = torch.zeros_like(peak), torch.full_like(peak, -1.0)
    for step in torch.arange(-0.9, 0.95, 0.1):
        levels = (runs * (-(32 + step) / _safe(peak))).round().clamp(-32, 31)
        sum_lx = (weights * levels * runs).sum(-1, keepdim=True)
        sum_ll = _safe((weights * levels * levels).sum(-1, keepdim=True))
        gain = sum_lx * sum_lx / sum_ll
        better = gain > best_gain
        best, best_gain = torch.where(better, sum_lx / sum_ll, best), torch.where(better, gain, best_gain)
    return best


def _q6_k(blocks: Tensor) -> Tensor:
    runs = blocks.reshape(-1, 16, 16)
    scale = _fit_signed(runs.reshape(-1, 16)).reshape(-1, 16)
    peak = scale.gather(-1, scale.abs().argmax(-1, keepdim=True))  # [B, 1]
    wide = peak / -128
    scale8 = (scale / _safe(wide)).round().clamp(-128, 127)
    step = (wide.half().float() * scale8).unsqueeze(-1)
    levels = (runs / _safe(step)).round().clamp(-32, 31)
    whole = (torch.where(step == 0, torch.zeros_like(levels), levels) + 32).to(torch.uint8).reshape(-1, 2, 4, 32)
    low, high = whole & 15, whole >> 4
    nibbles = torch.cat((low[:, :, 0] | (low[:, :, 2] << 4), low[:, :, 1] | (low[:, :, 3] << 4)), -1)  # [B, 2, 64]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    pairs = (high << shifts).sum(2).to(torch.uint8)  # [B, 2, 32]
    scales = scale8.to(torch.int8).view(torch.uint8)
    return torch.cat((nibbles.reshape(-1, 128), pairs.reshape(-1, 64), scales, _bytes(wide)), -1)


_ENCODERS = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
