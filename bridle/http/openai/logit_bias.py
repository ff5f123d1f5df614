"""Reads `logit_bias` as clients write it: an object of token ids in digits and numbers, which may have very many
entries, or llama.cpp's list of pairs, whose first is an id or a text and whose second is a number, or false for never.
"""

from __future__ import annotations

from math import inf, isnan
from typing import Any

from bridle.sampling import MAX_LOGIT_BIAS

_MAX_BIAS = 1e6
_MANY_BIASES = 256  # more are looked at all at once


def read_biases(value: Any) -> dict[int | str, float]:
    """Token ids (and texts) and values of a field, checked. Raises `ValueError` that names the first bad entry."""
    if value is None:
        return {}
    if not isinstance(value, (dict, list)):
        raise ValueError("logit_bias must be an object of token ids and numbers, or a list of pairs of them")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias has {len(value)} entries; at most {MAX_LOGIT_BIAS}")
    if isinstance(value, list):
        return _of_pairs(value)
    if len(value) > _MANY_BIASES and _are_biases(value):
        return dict(zip(map(int, value), map(float, value.values()), strict=True))
    return {_bias_token(token): _bias_value(token, bias) for token, bias in value.items()}


def _of_pairs(pairs: list[Any]) -> dict[int | str, float]:
    """What is named twice is added twice."""
    found: dict[int | str, float] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError("an entry of the list logit_bias must be a pair: a token id or a text, and a number")
        name, bias = pair
        if isinstance(name, bool) or not isinstance(name, (int, str)) or (isinstance(name, int) and name < 0):
            raise ValueError(f"logit_bias has a pair for {str(name)[:40]!r}; must be a token id or a text")
        value = -inf if bias is False else _bias_value(str(name)[:40], bias)
        found[name] = found.get(name, 0.0) + value
    return found


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
