"""Parses forms with files (`multipart/form-data`). The size of the body must have been checked before."""

from __future__ import annotations

from email.message import Message
from email.parser import HeaderParser
from typing import NamedTuple

from bridle.errors import InvalidRequest

_MAX_PARTS, _MAX_HEAD_BYTES, _MAX_FILENAME_CHARS = 16, 8 << 10, 255


class FormPart(NamedTuple):
    """The value of a form field; `filename` is None unless the value is a file."""

    filename: str | None
    content: bytes


def read_form(content_type: str, body: bytes) -> dict[str, FormPart]:
    """Return the fields of a form. Raises `InvalidRequest`."""
    head = Message()
    head["content-type"] = content_type
    boundary = head.get_boundary()
    if head.get_content_type() != "multipart/form-data" or not boundary:
        raise InvalidRequest("content-type: must be multipart/form-data with a boundary; send the file as a form")
    _, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("utf-8", "replace"), _MAX_PARTS + 2)
    if not parts or not parts[-1].startswith(b"--") or len(parts) > _MAX_PARTS + 1:
        raise InvalidRequest(f"the form is cut off, or has more than {_MAX_PARTS} fields; send it whole")
    return dict(map(_read_part, parts[:-1]))


def _read_part(part: bytes) -> tuple[str, FormPart]:
    """Return the name and the value of a form field."""
    start, found, content = part.partition(b"\r\n\r\n")
    if not found or len(start) > _MAX_HEAD_BYTES:
        raise InvalidRequest(f"a field of the form has no headers, or has headers of more than {_MAX_HEAD_BYTES} bytes")
    head = HeaderParser().parsestr(start.lstrip().decode("utf-8", "replace"))
    name, filename = head.get_param("name", header="content-disposition"), head.get_filename()
    if not isinstance(name, str) or not name:
        raise InvalidRequest("a field of the form has no name; each needs 'content-disposition: form-data; name=...'")
    if filename is not None and len(filename) > _MAX_FILENAME_CHARS:
        raise InvalidRequest(
            f"file: the file's name has {len(filename)} characters; at most {_MAX_FILENAME_CHARS}", "file"
        )
    return name, FormPart(filename, content)
