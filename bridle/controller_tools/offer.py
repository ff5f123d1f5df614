"""Descriptions of tools for models: a name, a sentence, and a JSON schema of the arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}
#: Kinds of parameters that can be passed by keyword.
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class ToolOffer(NamedTuple):
    """A tool that a model may call. `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a function's parameters. A parameter without a simple type allows any value."""
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:  # a function without a signature, such as some built-in ones
        return {"type": "object"}
    named = [each for each in found if each.kind in _NAMED]
    return {
        "type": "object",
        "properties": {each.name: _type_of(each.annotation) for each in named},
        "required": [each.name for each in named if each.default is each.empty],
        "additionalProperties": any(each.kind is each.VAR_KEYWORD for each in found),
    }


def _type_of(annotation: Any) -> dict[str, str]:
    """Return the JSON schema of an annotation, which is a type or its name."""
    kind = _TYPES.get(getattr(annotation, "__name__", str(annotation)))
    return {} if kind is None else {"type": kind}
