"""Reads `logit_bias` as clients write it: an object of token ids in digits and numbers, which may have very many
entries."""

from __future__ import annotations

from math import isnan
from typing import Any

from bridle.sampling import MAX_LOGIT_BIAS

_MAX_BIAS = 1e6
_MANY_BIASES = 256  # more are looked at all at once


def read_biases(value: Any) -> dict[int, float]:
    """Token ids and values of a field, checked. Raises `ValueError` that names the first bad entry."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("logit_bias must be an object of token ids and numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias has {len(value)} entries; at most {MAX_LOGIT_BIAS}")
    if len(value) > _MANY_BIASES and _are_biases(value):
        return dict(zip(map(int, value), map(float, value.values()), strict=True))
    return {_bias_token(token): _bias_value(token, bias) for token, bias in value.items()}


def _are_biases(value: dict[str, Any]) -> bool:
    """Whether all entries are valid. Only if one may not be, each is checked to find it."""
    names = "".join(value)
    is_named = names.isascii() and names.isdigit() and 0 < min(map(len, value)) <= max(map(len, value)) < 12
    biases = value.values()
    if not is_named or not set(map(type, biases)) <= {int, float}:
        return False
    return -_MAX_BIAS <= min(biases) <= max(biases) <= _MAX_BIAS and not any(map(isnan, biases))


def _bias_token(token: str) -> int:
    if not (token.isascii() and token.isdigit() and len(token) < 12):
        raise ValueError(f"logit_bias has the key {token[:40]!r}; keys are token ids in digits")
    return int(token)


def _bias_value(token: str, bias: Any) -> float:
    if isinstance(bias, bool) or not isinstance(bias, (int, float)):
        raise ValueError(f"logit_bias[{token}] must be a number")
    if not -_MAX_BIAS <= bias <= _MAX_BIAS:  # also NaN and infinities
        raise ValueError(f"logit_bias[{token}] is {bias}; must be between -1000000 and 1000000")
    return float(bias)
