"""Text files in messages, which are replaced by their text: parts of type `file` in chats, and `input_file` in
responses. A file is sent as base64, or fetched from the hosts that are allowed for images."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bridle.errors import InvalidRequest, MediaRefused, UnsupportedFeature
from bridle.multimodal import MediaReader
from bridle.multimodal.media_fetcher import is_remote

#: Limits: files in the messages of one request, bytes of a file, and characters of its name.
MAX_FILES, MAX_FILE_BYTES, MAX_NAME_CHARS = 16, 1 << 20, 200
_PARTS = ("file", "input_file")
_PREFIX = "data:"


def is_file(part: Any) -> bool:
    """Return whether a content part is a file to read as text."""
    return isinstance(part, Mapping) and part.get("type") in _PARTS


def address_of(part: Mapping[str, Any]) -> str | None:
    """Return the URL from which a file must be fetched; None if the request contains the file."""
    url = _fields(part).get("file_url")
    return url if is_remote(url) else None


def has_remote_file(messages: Iterable[Any]) -> bool:
    """Return whether a file in the messages must be fetched."""
    return any(address_of(part) is not None for _, part in _files_of(messages))


def with_files(messages: Sequence[Any], reader: MediaReader | None) -> Sequence[Any]:
    """Return the messages with the text of each file instead of the file. Slow if files are fetched. Raises
    `InvalidRequest` or `UnsupportedFeature` that names the part."""
    files = list(_files_of(messages)) if isinstance(messages, Sequence) else []
    check_count(len(files), "messages")
    if not files:
        return messages
    deadline = 0.0 if reader is None else time.monotonic() + reader.limits.fetch_seconds
    texts = {id(part): {"type": "text", "text": file_text(part, where, reader, deadline)} for where, part in files}
    return [_replaced(message, texts) for message in messages]


def check_count(number: int, where: str) -> None:
    """Raise `InvalidRequest` if one request has too many files."""
    if number > MAX_FILES:
        raise InvalidRequest(f"{where} has {number} files; at most {MAX_FILES}", where)


def file_text(part: Mapping[str, Any], where: str, reader: MediaReader | None = None, deadline: float = 0.0) -> str:
    """Return the prompt text of a file. A file with a URL is fetched from the hosts that `reader` allows."""
    fields = _fields(part)
    if fields.get("file_id") is not None:
        raise UnsupportedFeature(
            f"{where} has a file_id, but this server stores no files for messages; send file_data", where
        )
    name = fields.get("filename")
    if name is not None and not (isinstance(name, str) and len(name) <= MAX_NAME_CHARS and name.isprintable()):
        raise InvalidRequest(f"{where}.filename must be a printable text of up to {MAX_NAME_CHARS} characters", where)
    text = _decoded(_data_of(part, fields, where, reader, deadline), where)
    head = "<file>" if name is None else f'<file name="{name.replace(chr(34), chr(39))}">'
    return f"{head}\n{text}\n</file>"


def _data_of(
    part: Mapping[str, Any], fields: Mapping[str, Any], where: str, reader: MediaReader | None, deadline: float
) -> bytes:
    address = address_of(part)
    if address is None:
        given = fields.get("file_data") or fields.get("file_url")
        if not isinstance(given, str):
            raise InvalidRequest(f"{where} has no file: send file_data, as data:text/plain;base64,...", where)
        return _unpacked(given, where)
    if reader is None or not reader.hosts:
        raise UnsupportedFeature(f"{where}.file_url: this server fetches no URLs; send file_data instead", where)
    return reader.hosts.fetch(address, MAX_FILE_BYTES, deadline, where, "text")


def _unpacked(given: str, where: str) -> bytes:
    """Return the bytes of base64 text, which may be in a `data:` URL."""
    if given[: len(_PREFIX)].lower() == _PREFIX:
        head, comma, given = given.partition(",")
        if not comma or head.rpartition(";")[2].strip().lower() != "base64":
            raise InvalidRequest(f"{where}.file_data must be base64, or data:text/plain;base64,...", where)
    if len(given) > 4 * MAX_FILE_BYTES // 3 + 4:
        raise InvalidRequest(f"{where} has {len(given)} characters; a file may have {MAX_FILE_BYTES} bytes", where)
    try:
        return base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{where}.file_data is not valid base64", where) from None


def _decoded(data: bytes, where: str) -> str:
    """Return the text of a file. A PDF may consist of letters alone, so it is recognized by its first bytes."""
    kind = "a PDF" if data.lstrip()[:5] == b"%PDF-" else "no text in UTF-8"
    if kind != "a PDF" and b"\0" not in data:
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError:
            pass
    raise MediaRefused(f"{where} is {kind}; only text files are accepted. Send the file's text instead", where)


def _fields(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the mapping with the file's fields: the part itself or, in chats, its field `file`."""
    inner = part.get("file")
    return inner if part.get("type") == "file" and isinstance(inner, Mapping) else part


def _files_of(messages: Iterable[Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if is_file(part):
                yield f"messages[{i}].content[{j}]", part


def _replaced(message: Any, texts: Mapping[int, dict[str, str]]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list) or not any(id(part) in texts for part in content):
        return message
    return {**message, "content": [texts.get(id(part), part) for part in content]}
