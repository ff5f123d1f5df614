"""Formats of strings in JSON schemas that llguidance does not support, and their replacements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridle.structured_output.complement import Schema

_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_CHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_NO_COLON = _CHAR.replace(":@", "@")
_AUTHORITY = f"//{_CHAR}*"
_TAIL = rf"(?:\?(?:{_CHAR}|[/?])*)?(?:#(?:{_CHAR}|[/?])*)?"
_RELATIVE = f"(?:{_AUTHORITY}(?:/{_CHAR}*)*|/(?:{_CHAR}+(?:/{_CHAR}*)*)?|{_NO_COLON}+(?:/{_CHAR}*)*|)"
_ABSOLUTE = (
    f"[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}(?:/{_CHAR}*)*|/(?:{_CHAR}+(?:/{_CHAR}*)*)?|{_CHAR}+(?:/{_CHAR}*)*|)"
)
#: Replacements of formats that llguidance does not support. International formats of the standard allow all that their
#: ASCII forms allow; the others are further names of a supported format.
FORMATS: Mapping[str, Schema] = {
    "json-pointer": {"pattern": f"^{_POINTER}$"},
    "relative-json-pointer": {"pattern": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$"},
    "uri-reference": {"pattern": f"^(?:{_ABSOLUTE}|{_RELATIVE}){_TAIL}$"},
    "iri-reference": {"pattern": f"^(?:{_ABSOLUTE}|{_RELATIVE}){_TAIL}$"},
    "iri": {"format": "uri"},
    "idn-email": {"format": "email"},
    "idn-hostname": {"format": "hostname"},
    "host-name": {"format": "hostname"},
    "ip-address": {"format": "ipv4"},
    "url": {"format": "uri"},
    "byte": {"pattern": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"},
}
#: Formats that restrict values, from draft 4 on. According to every draft, any other format is a note for people.
_STANDARD = frozenset(
    {
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
        *("uri", "uri-reference", "iri", "iri-reference", "uri-template", "uuid", "regex"),
        *("json-pointer", "relative-json-pointer"),
    }
)


def is_known(name: Any) -> bool:
    """Return whether llguidance must enforce or refuse the format `name`."""
    return name in _STANDARD and name not in FORMATS
