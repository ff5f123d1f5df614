"""Reads the fields of a request body: the route's own fields, and fields of other systems that have an equivalent in
bridle.

A field of another system is converted to bridle's field. A field is refused if bridle has no equivalent and the field
would change the output; `bridle.compat` has the tables. A misspelled field is refused; other unknown fields are
ignored, because clients send fields that only some servers know. If the server or the request is strict, unknown fields
are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, model_validator

from bridle.compat.request_fields import BY_NAME
from bridle.compat.suggestions import nearest
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.safe_repr import short_repr
from bridle.sampling import Api, meanings
from bridle.structured_output.request_fields import SHORT

#: The request header that asks to refuse unknown fields.
STRICT_HEADER = "x-strict-fields"
#: The maximum number of unknown fields in a body, because each field is looked up.
MAX_UNKNOWN = 64
_MAX_NAME_CHARS = 80
_NOT_STRICT: tuple[Mapping[str, str], bool] = ({}, False)
#: The headers of the current call, and whether the server is strict by default.
STRICTNESS: ContextVar[tuple[Mapping[str, str], bool]] = ContextVar("strict_fields", default=_NOT_STRICT)


def is_strict() -> bool:
    """Return whether unknown fields are refused. The request's header decides; without it, the server's setting."""
    headers, default = STRICTNESS.get()
    said = headers.get(STRICT_HEADER, "").strip().lower()
    return default if not said else said not in ("0", "false", "no", "off")


class UnknownField(InvalidRequest):
    """The request has an unknown field; the message names the field that was probably meant."""

    code = "unknown_field"


class Fields(BaseModel):
    """Base class of request bodies. A field of another system is stored under the name of bridle's equivalent field."""

    model_config = ConfigDict(strict=True)

    #: The API whose names for sampling parameters the body uses.
    api: ClassVar[Api] = "openai"
    #: True if fields that change the output text apply to this body.
    has_text: ClassVar[bool] = True
    #: The field that contains this object, where the table has names such as `field.name`.
    within: ClassVar[str] = ""

    @model_validator(mode="wrap")
    @classmethod
    def _known(cls, data: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(data, dict) and not data.keys() <= cls.model_fields.keys():
            data = _translated(cls, data)
        return read(data)


class ControllerFields(Fields):
    """The fields that name the controllers of a request; `bridle.serving.requests.steering` reads them."""

    controller: str | None = None
    controller_arg: Any = None
    controllers: list[Any] | None = None
    client_tools: list[str] | None = None


class InnerFields(Fields):
    """Base class of objects inside request bodies, in which fields of other systems are not converted."""

    has_text: ClassVar[bool] = False


def _translated(kind: type[Fields], data: dict[Any, Any]) -> dict[Any, Any]:
    """Return the body with bridle's field names. Raises an error for a field that bridle refuses."""
    own = kind.model_fields
    found = {name: value for name, value in data.items() if name in own}
    others = {str(name): value for name, value in data.items() if name not in own and value is not None}
    if len(others) > MAX_UNKNOWN:
        raise InvalidRequest(f"the body has {len(others)} unknown fields; at most {MAX_UNKNOWN}")
    for name, value in others.items():
        _take(kind, name, value, found)
    return found


def _take(kind: type[Fields], name: str, value: Any, found: dict[Any, Any]) -> None:
    """Store the value of another system's field under the name of bridle's equivalent field."""
    here, value = _here(kind, name, value)
    if here is not None:
        if found.get(here) is not None:
            raise InvalidRequest(
                f"the body has both {here} and {name}, which are names of the same field; send one of them", name
            )
        found[here] = value
        return
    whole = f"{kind.within}.{name}" if kind.within else name
    row = BY_NAME.get(whole)
    may_matter = row is not None and not row.here and not row.is_neutral and not row.is_off(value)
    if row is not None and may_matter and (kind.has_text or kind.within):
        raise UnsupportedFeature(f"{whole} is not supported here: {row.why}", name)
    is_elsewhere = row is not None and bool(row.here) and value not in row.off
    if kind.has_text and (is_elsewhere or name in SHORT or name in meanings()):
        where = f"; {row.why}" if row is not None and row.why else ""
        raise UnsupportedFeature(f"{name} is {short_repr(value)}, but this route does not accept it{where}", name)
    said, meant = name[:_MAX_NAME_CHARS], _meant(kind, name[:_MAX_NAME_CHARS]) if row is None else None
    if meant is not None:
        raise UnknownField(f"this route has no field {said!r}; did you mean {meant!r}?", said)
    if row is None and kind.has_text and value and _speaks_of_form(name, value):
        raise UnknownField(
            f"this route has no field {said!r}, which looks like a constraint; the fields for constraints are "
            f"{', '.join(_FORMS)}",
            said,
        )
    if is_strict() and (row is None or not row.is_off(value)):
        why = f" ({row.why})" if row is not None and row.why else ""
        raise UnknownField(
            f"this route has no field {said!r}{why}, and the server refuses unknown fields (strict_fields)", said
        )


#: Names of constraint fields for error messages, and the parts of names that mark an unknown field as a constraint.
_FORMS = ("regex", "choice", "grammar", "json_schema", "response_format", "structured_outputs", "constraint")
_OF_FORMS = re.compile(
    r"guided|regex|grammar|schema|constrain|structured|(?:^|_)(?:gbnf|ebnf|lark)(?:_|$)", re.IGNORECASE
)


def _speaks_of_form(name: str, value: Any) -> bool:
    """Return whether the name of an unknown field, or a name in its value, suggests that it constrains the output."""
    within = [each for each in value if isinstance(each, str)] if isinstance(value, dict) else []
    return any(_OF_FORMS.search(each[:_MAX_NAME_CHARS]) for each in (name, *within[:MAX_UNKNOWN]))


@lru_cache(maxsize=4_096)
def _meant(kind: type[Fields], name: str) -> str | None:
    """Return the known field name that a misspelled name probably means; None if no name is similar."""
    known = set(kind.model_fields)
    if kind.has_text:
        known |= {each for each in (*BY_NAME, *SHORT) if _here(kind, each, None)[0] is not None}
    return nearest(name, known)


def _here(kind: type[Fields], name: str, value: Any) -> tuple[str | None, Any]:
    """Return the route's equivalent of another system's field, and its value. Without an equivalent, the name is
    None."""
    if not kind.has_text:
        return None, value
    own = kind.model_fields
    row = BY_NAME.get(name)
    if row is not None and not row.here:
        return None, value
    for meant in (row.here if row is not None else "", name):
        for here in (meant, _on(kind.api, meant)):
            if here and here != name and here in own:
                return here, row.value_here(value) if row is not None else value
    short = SHORT.get(row.here if row is not None and row.here else name)
    if short is not None and "constraint" in own:
        return "constraint", {short: value}
    return None, value


def _on(api: Api, name: str) -> str | None:
    """Return the name that an API has for a sampling parameter; None if the API does not have it."""
    meaning = meanings().get(name)
    return None if meaning is None else meaning.names.get(api, name)
