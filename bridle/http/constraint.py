"""Constraints on the OpenAI routes: from the fields of a body to what the text must look like.

OpenAI's `response_format`, the short fields of open servers with vLLM's names for them, and `constraint`, which
takes any constraint as plain data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bridle.constraints import Constraint, JsonObject, JsonSchema, parse
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.shown import shown

if TYPE_CHECKING:
    from bridle.http.schemas import SamplingFields

_KINDS = {
    "regex": "regex",
    "guided_regex": "regex",
    "choice": "choice",
    "guided_choice": "choice",
    "grammar": "lark",
    "guided_grammar": "lark",
    "guided_json": "json_schema",
}
# With a `value`: the forms of text-generation-inference, which huggingface_hub sends here too.
_NATIVE_FORMATS = ("json", "json_object", "json_schema", "regex")
_FORMATS = "'text', 'json_object' and 'json_schema'"


def constraint_of(body: SamplingFields) -> Constraint | None:
    """What a body says of the form of the text; None if nothing. Raises `InvalidRequest` that names the field."""
    given = {name: getattr(body, name) for name in ("response_format", "constraint", *_KINDS)}
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("response_format", {"type": None}).get("type", "text") == "text":
        del given["response_format"]
    if len(given) > 1:
        raise InvalidRequest(
            f"{' and '.join(given)} were given; a text has one constraint ('constraint' can combine several)",
            list(given)[1],
        )
    for name, value in given.items():
        try:
            return _read(name, value)
        except InvalidRequest as error:
            error.param = name
            raise
    return None


def native_form(kind: str, value: Any) -> Constraint:
    """A form of text-generation-inference by its `type`. A schema that tells of properties is one of an object there,
    also if it does not say so."""
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


def _read(name: str, value: Any) -> Constraint:
    if name == "response_format":
        return _of_format(value)
    return parse(value if name == "constraint" else {_KINDS[name]: value})


def _of_format(value: Mapping[str, Any]) -> Constraint:
    kind = value.get("type")
    if value.get("value") is not None and kind in _NATIVE_FORMATS:
        return native_form(kind, value["value"])
    if kind == "json_object":
        return JsonObject()
    if kind != "json_schema":
        raise UnsupportedFeature(f"response_format is {shown(kind)}; this server takes {_FORMATS}")
    form = value.get("json_schema")
    if not isinstance(form, Mapping) or not isinstance(form.get("schema"), Mapping):
        raise InvalidRequest("response_format.json_schema.schema must be an object: the JSON schema")
    return JsonSchema(form["schema"])
