"""Reads constraints from the fields of requests and from Python arguments.

Fields have short names (`regex`, `choice`, ...), or the names in vLLM, SGLang and llama.cpp. OpenAI's `response_format`
and vLLM's `structured_outputs` are read too. The field `constraint` takes any constraint as plain data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.safe_repr import short_repr
from bridle.structured_output.spec import Constraint, JsonObject, JsonSchema, parse
from bridle.structured_output.structural_tag import structural_tag

#: Short names of fields, each with its kind of constraint.
SHORT: Mapping[str, str] = {
    "regex": "regex",
    "guided_regex": "regex",
    "choice": "choice",
    "guided_choice": "choice",
    "grammar": "grammar",
    "guided_grammar": "grammar",
    "ebnf": "grammar",
    "guided_json": "json_schema",
    "json_schema": "json_schema",
}
#: All names of fields for constraints.
NAMES = ("response_format", "constraint", "structured_outputs", *SHORT)
# vLLM's later form of these fields: one of them in an object, together with switches that may be off.
_STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
# Forms of text-generation-inference that have a `value`; huggingface_hub also sends these.
_NATIVE_FORMATS = ("json", "json_object", "json_schema", "regex")
_FORMATS = "'text', 'json_object', 'json_schema', 'regex', 'grammar' and 'structural_tag'"
#: Where a form of `response_format` has its content, by type: as OpenAI, llama.cpp and others write it.
_PLACES = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema", "schema"),
    "regex": ("regex", "pattern"),
    "grammar": ("grammar",),
}


def constraint_named(given: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint in a dictionary of fields, or None; fields with the value None count as absent. The same
    constraint under two names counts once, because some clients send both names to support servers of different
    versions. Raises `InvalidRequest`, which names the field."""
    given = {name: value for name, value in given.items() if value is not None}
    if _is_text(given.get("response_format")):
        _said(given.pop("response_format"))
    found: Constraint | None = None
    for name, value in given.items():
        try:
            form = _read(name, value)
        except InvalidRequest as error:
            error.param = name
            raise
        if found is not None and form != found:
            raise InvalidRequest(
                f"{' and '.join(given)} were given; send only one ('constraint' can combine several)", name
            )
        found = form
    return found


def field_with_constraint(body: Any) -> str:
    """Return the field of a request's body that holds its constraint; `constraint` if the body has no known field."""
    if not isinstance(body, Mapping):
        return "constraint"
    found = next((name for name in NAMES if body.get(name) is not None), None)
    return found or ("text.format" if body.get("text") is not None else "constraint")  # `text` of the Responses API


def native_form(kind: str, value: Any) -> Constraint:
    """Return the constraint for a `grammar` of text-generation-inference with this `type` and value. As in
    text-generation-inference, a schema with properties describes an object, even if it names no type."""
    if kind == "regex":
        return parse({"regex": value})
    if kind == "json_schema" and isinstance(value, Mapping) and "schema" in value:
        value = value["schema"]
    if kind == "json_object" and value is None:
        return JsonObject()
    form = parse({"json_schema": value})
    schema = json.loads(form.schema) if isinstance(form, JsonSchema) else None
    if isinstance(schema, dict) and "properties" in schema and "type" not in schema:
        return JsonSchema({"type": "object"} | schema)
    return form


def _of_form(value: Mapping[Any, Any]) -> Constraint:
    kind = value.get("type")
    if kind not in _NATIVE_FORMATS or value.get("value") is None:
        raise UnsupportedFeature(
            f"grammar is {short_repr(value)}; an object must have a type ({', '.join(_NATIVE_FORMATS)}) and a value"
        )
    return native_form(kind, value["value"])


def _is_text(form: Any) -> bool:
    return isinstance(form, Mapping) and form.get("type", "text") == "text"


def _read(name: str, value: Any) -> Constraint:
    if name == "response_format":
        return _of_format(value)
    if name == "structured_outputs":
        return _of_structured(value)
    if name == "grammar" and isinstance(value, Mapping):  # as text-generation-inference has it
        return _of_form(value)
    return parse(value if name == "constraint" else {SHORT[name]: value})


def _of_structured(value: Any) -> Constraint:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"structured_outputs is {short_repr(value)}; must be an object")
    given = {name: one for name, one in value.items() if one is not None and one is not False}
    given.pop("disable_fallback", None)  # there is no fallback to disable
    if given == {"json_object": True}:
        return JsonObject()
    name = next(iter(given), "")
    if name == "structural_tag" and len(given) == 1:
        return structural_tag(given[name])
    if len(given) != 1 or name not in _STRUCTURED:
        raise InvalidRequest(
            f"structured_outputs has {short_repr(', '.join(given)) if given else 'nothing'}; this server takes one of "
            f"{', '.join(_STRUCTURED)}, structural_tag and json_object"
        )
    return parse({_STRUCTURED[name]: given[name]})


def _of_format(value: Any) -> Constraint:
    if hasattr(value, "model_json_schema"):  # a pydantic model, in Python
        return JsonSchema(value)
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"response_format is {short_repr(value)}; must be an object")
    kind = value.get("type")
    if value.get("value") is not None and kind in _NATIVE_FORMATS:
        return native_form(kind, value["value"])
    if kind == "structural_tag":
        return structural_tag(value)
    said = _said(value)
    if kind in ("regex", "grammar"):
        return parse({str(kind): said})
    if kind == "json_object" and said is None:
        return JsonObject()
    if value.get("schema") is None:
        said = said.get("schema") if isinstance(said, Mapping) else None
    if not isinstance(said, Mapping):
        where = "json_schema.schema" if kind == "json_schema" else "schema"
        raise InvalidRequest(f"response_format.{where} must be an object: the JSON schema")
    return JsonSchema(said)


def _said(form: Mapping[Any, Any]) -> Any:
    """Return the value in a `response_format` besides its `type`. Raises `InvalidRequest` for unknown fields, because
    bridle ignores no field."""
    kind = form.get("type", "text")
    if kind not in _PLACES:
        raise UnsupportedFeature(f"response_format is {short_repr(kind)}; this server takes {_FORMATS}")
    given = {name: value for name, value in form.items() if name not in ("type", "value") and value is not None}
    wrong = [name for name in given if name not in _PLACES[kind]]
    if wrong or len(given) > 1:
        known = " or ".join(_PLACES[kind]) or "nothing else"
        raise InvalidRequest(
            f"response_format of type {kind} has {short_repr(', '.join(map(str, wrong or given)))}; it takes {known}"
        )
    return next(iter(given.values()), None)
