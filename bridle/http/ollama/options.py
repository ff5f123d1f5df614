"""Converts the `options` of Ollama's requests to the fields that other APIs have at the top level of a body.

As in Ollama, an option of the wrong type is refused, and an unknown option is ignored. Every sampling parameter of
bridle is also accepted as an option.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from bridle.errors import InvalidRequest
from bridle.http.openai.schemas import SamplingFields
from bridle.safe_repr import short_repr

_log = logging.getLogger(__name__)
_MAX_OPTIONS = 128

#: Ollama's sampling defaults, for values that neither the request nor the checkpoint sets.
DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}

#: Ollama's options by type, with bridle's field for each. Options without a field have no effect here: they set how a
#: model is loaded, which the operator decides, or shift the context, which bridle never does.
_INTEGERS = {
    "num_predict": "max_tokens",
    "seed": "seed",
    "top_k": "top_k",
    "num_ctx": "num_ctx",
    **dict.fromkeys(("num_keep", "repeat_last_n", "num_batch", "num_gpu", "main_gpu", "num_thread"), ""),
    "draft_num_predict": "",
}
_FLOATS = {
    "repeat_penalty": "repetition_penalty",
    **{name: name for name in ("temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty")},
}
_BOOLEANS = {"use_mmap": ""}
#: The minimum of some integers; a smaller value means the default.
_LEAST = {"num_predict": 1, "num_ctx": 1, "seed": 0, "top_k": 0}


def with_options(data: Any) -> Any:
    """Return a body with its options merged into its fields. A field of the body has precedence over an option. Raises
    `InvalidRequest`."""
    options = data.get("options") if isinstance(data, dict) else None
    if options is None:
        return data
    if not isinstance(options, dict) or len(options) > _MAX_OPTIONS:
        raise InvalidRequest(f"options must be an object with at most {_MAX_OPTIONS} entries", "options")
    fields = {name: value for name, value in data.items() if name != "options"}
    for name, value in options.items():
        field, value = _field_of(name, value)
        if field and value is not None:
            fields.setdefault(field, value)
    return fields


def _field_of(name: str, value: Any) -> tuple[str, Any]:
    """Return bridle's field for an option, and its value; the name is empty if the option has no effect."""
    if value is None:
        return "", None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if name in _INTEGERS:
        if not is_number or value != value or abs(value) > 1 << 62:
            raise _wrong(name, value, "integer")
        value = int(value)
        return _INTEGERS[name], None if value < _LEAST.get(name, value) else value
    if name in _FLOATS:
        if not is_number:
            raise _wrong(name, value, "float32")
        return _FLOATS[name], float(value)
    if name in _BOOLEANS:
        if not isinstance(value, bool):
            raise _wrong(name, value, "boolean")
        return _BOOLEANS[name], value
    if name == "stop":
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise _wrong(name, value, "array of strings")
        return name, value
    if name in SamplingFields.model_fields:
        return name, value
    _log.debug("the option %s is unknown and has no effect", name[:80])
    return "", None


def _wrong(name: str, value: Any, kind: str) -> InvalidRequest:
    return InvalidRequest(f"option {name!r} is {short_repr(value)}; must be of type {kind}", f"options.{name}")
