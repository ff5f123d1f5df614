"""Fields of bodies that are derived from the sampling parameters: one that is added there is taken on every route.

A body that has a field with a rule of its own writes it down, which takes the place of the derived one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema, create_model

from bridle.http.fields import Fields
from bridle.http.openai.logit_bias import read_biases
from bridle.sampling import DRAFT_WORDS, Api, SamplingParams, meanings


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


_LIST = {"type": "array", "items": {"type": "string"}}
_Texts = Annotated[
    Any, BeforeValidator(_texts), WithJsonSchema({"anyOf": [{"type": "string"}, _LIST, {"type": "null"}]})
]
_ID_LIST = {"type": "array", "items": {"type": "integer"}}
_Ids = Annotated[Any, BeforeValidator(_ids), WithJsonSchema({"anyOf": [_ID_LIST, {"type": "null"}]})]
_PAIRS = {"type": "array", "items": {"type": "array", "minItems": 2, "maxItems": 2}}
_Biases = Annotated[
    Any,
    BeforeValidator(read_biases),
    WithJsonSchema(
        {"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, _PAIRS, {"type": "null"}]}
    ),
]
_DRAFTS = {"anyOf": [{"type": "integer"}, {"enum": [*DRAFT_WORDS]}, {"type": "null"}]}
#: Fields that take more than their type says; the sampling parameters check them.
_WIDER: Mapping[str, Any] = {"speculate": Annotated[Any, WithJsonSchema(_DRAFTS)]}
#: The type of a field in a body, by that of the sampling parameter.
_KINDS: Mapping[str, Any] = {
    "int": int | None,
    "float": float | None,
    "bool": bool | None,
    "str": str | None,
    "tuple[str, ...]": _Texts,
    "tuple[int, ...]": _Ids,
    "Mapping[int, float]": _Biases,
}


def derived_fields(
    api: Api, params: type[SamplingParams] = SamplingParams, without: Collection[str] = ()
) -> type[Fields]:
    """A body with every plain sampling parameter that `api` takes, by its name there; None is one that was left out."""
    names = {name: meaning.names.get(api, name) for name, meaning in meanings(params).items()}
    kinds = {each.name: str(each.type).removesuffix(" | None") for each in fields(params)}
    taken: dict[str, Any] = {
        name: (_WIDER.get(own) or _KINDS[kinds[own]], None)
        for own, name in names.items()
        if name is not None and kinds[own] in _KINDS and own not in without
    }
    return create_model("DerivedFields", __base__=Fields, **taken)
