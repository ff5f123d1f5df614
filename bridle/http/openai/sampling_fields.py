"""Derives fields of request bodies from `SamplingParams`, so that all routes get every new sampling parameter.

A body may declare a field itself, which replaces the derived field. `logit_bias` is an object from token ids (as
digits) to numbers, with up to `MAX_LOGIT_BIAS` entries. `logit_bias` may also be llama.cpp's list of pairs: a token id
or a text, and a number, or false to ban the token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from math import inf, isnan
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema, create_model

from bridle.http.fields import Fields
from bridle.sampling import DRAFT_WORDS, Api, SamplingParams, meanings
from bridle.sampling_values import MAX_LOGIT_BIAS

_MAX_BIAS = 1e6
_MANY_BIASES = 256  # more entries are checked together, which is faster


def _texts(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    if value is not None and not (isinstance(value, list) and set(map(type, value)) <= {str}):
        raise ValueError("must be a string or a list of strings")
    return None if value is None else tuple(value)


def _ids(value: Any) -> Any:
    if value is not None and not (isinstance(value, list) and set(map(type, value)) <= {int}):
        raise ValueError("must be a list of integers")
    return None if value is None else tuple(value)


def _read_biases(value: Any) -> dict[int | str, float]:
    """Return the validated token ids (or texts) and biases of `logit_bias`. Raises `ValueError` that names the first
    invalid entry."""
    if value is None:
        return {}
    if not isinstance(value, (dict, list)):
        raise ValueError(
            "logit_bias must be an object that maps token ids to numbers, or a list of [token, number] pairs"
        )
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias has {len(value)} entries; at most {MAX_LOGIT_BIAS}")
    if isinstance(value, list):
        return _of_pairs(value)
    if len(value) > _MANY_BIASES and _are_biases(value):
        return dict(zip(map(int, value), map(float, value.values()), strict=True))
    return {_bias_token(token): _bias_value(token, bias) for token, bias in value.items()}


def _of_pairs(pairs: list[Any]) -> dict[int | str, float]:
    """Convert a list of pairs to biases by token. Biases of the same token are added."""
    found: dict[int | str, float] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(
                "an entry of the list logit_bias must be a pair [token, number], where token is a token id or a text"
            )
        name, bias = pair
        if isinstance(name, bool) or not isinstance(name, (int, str)) or (isinstance(name, int) and name < 0):
            raise ValueError(
                f"logit_bias has a pair for {str(name)[:40]!r}; the first element of a pair must be a token id or a "
                "text"
            )
        value = -inf if bias is False else _bias_value(str(name)[:40], bias)
        found[name] = found.get(name, 0.0) + value
    return found


def _are_biases(value: dict[str, Any]) -> bool:
    """Return whether all entries of `logit_bias` are valid. This check is fast, but does not find the invalid entry."""
    names = "".join(value)
    is_named = names.isascii() and names.isdigit() and 0 < min(map(len, value)) <= max(map(len, value)) < 12
    biases = value.values()
    if not is_named or not set(map(type, biases)) <= {int, float}:
        return False
    return -_MAX_BIAS <= min(biases) <= max(biases) <= _MAX_BIAS and not any(map(isnan, biases))


def _bias_token(token: str) -> int:
    if not (token.isascii() and token.isdigit() and len(token) < 12):
        raise ValueError(f"logit_bias has the key {token[:40]!r}; keys must be token ids in digits")
    return int(token)


def _bias_value(token: str, bias: Any) -> float:
    if isinstance(bias, bool) or not isinstance(bias, (int, float)):
        raise ValueError(f"logit_bias[{token}] must be a number")
    if not -_MAX_BIAS <= bias <= _MAX_BIAS:  # also NaN and infinities
        raise ValueError(f"logit_bias[{token}] is {bias}; must be between -1000000 and 1000000")
    return float(bias)


_LIST = {"type": "array", "items": {"type": "string"}}
_Texts = Annotated[
    Any, BeforeValidator(_texts), WithJsonSchema({"anyOf": [{"type": "string"}, _LIST, {"type": "null"}]})
]
_ID_LIST = {"type": "array", "items": {"type": "integer"}}
_Ids = Annotated[Any, BeforeValidator(_ids), WithJsonSchema({"anyOf": [_ID_LIST, {"type": "null"}]})]
_PAIRS = {"type": "array", "items": {"type": "array", "minItems": 2, "maxItems": 2}}
_Biases = Annotated[
    Any,
    BeforeValidator(_read_biases),
    WithJsonSchema(
        {"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, _PAIRS, {"type": "null"}]}
    ),
]
_DRAFTS = {"anyOf": [{"type": "integer"}, {"enum": [*DRAFT_WORDS]}, {"type": "null"}]}
#: Fields that accept more values than their type says; `SamplingParams` validates the values.
_WIDER: Mapping[str, Any] = {"speculate": Annotated[Any, WithJsonSchema(_DRAFTS)]}
#: The type of a field in a body, by the type of the sampling parameter.
_KINDS: Mapping[str, Any] = {
    "int": int | None,
    "float": float | None,
    "bool": bool | None,
    "str": str | None,
    "tuple[str, ...]": _Texts,
    "tuple[int, ...]": _Ids,
    "Mapping[int, float]": _Biases,
    "Mapping[str, float]": dict[str, float] | None,
}


def derived_fields(
    api: Api, params: type[SamplingParams] = SamplingParams, without: Collection[str] = ()
) -> type[Fields]:
    """Return a base class with a field for every plain sampling parameter of `api`, under the API's names. The value
    None means that a field is missing."""
    names = {name: meaning.names.get(api, name) for name, meaning in meanings(params).items()}
    kinds = {each.name: str(each.type).removesuffix(" | None") for each in fields(params)}
    taken: dict[str, Any] = {
        name: (_WIDER.get(own) or _KINDS[kinds[own]], None)
        for own, name in names.items()
        if name is not None and kinds[own] in _KINDS and own not in without
    }
    return create_model("DerivedFields", __base__=Fields, **taken)
