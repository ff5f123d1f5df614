"""Finds images, sounds and videos in requests: content parts of several APIs, `data:` URLs and base64. A local file is
opened only if a Python program passes it as a `Path`. Files on other servers are fetched by `ImageHosts`. Error
messages contain nothing of a file's content.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from bridle.errors import InvalidRequest, MediaRefused, UnsupportedFeature
from bridle.multimodal.limits import FORMATS, SOUND_FORMATS, VIDEO_FORMATS, MediaLimits
from bridle.multimodal.media_fetcher import ImageHosts, is_remote
from bridle.multimodal.modalities import AUDIO, IMAGE, OF_PARTS, VIDEO, WORDS
from bridle.safe_repr import short_repr

_PREFIX = "data:"
#: The media types of files of each kind.
_TYPES: Mapping[str, Mapping[str, str]] = {IMAGE: FORMATS, AUDIO: SOUND_FORMATS, VIDEO: VIDEO_FORMATS}
NO_HOSTS = ImageHosts()


@dataclass(frozen=True, slots=True)
class Source:
    """A media file of a request that was not read yet. The file is given as bytes, a URL, base64 with its media type
    `kind`, a path, or an object such as a Pillow image. `is_low` means that the client wants an image in low detail."""

    value: Any
    where: str
    kind: str | None = None
    is_low: bool = False
    modality: str = IMAGE

    @property
    def is_remote(self) -> bool:
        """Return whether the file has to be fetched from another server."""
        return self.kind is None and is_remote(self.value)

    def open(self, limits: MediaLimits, hosts: ImageHosts = NO_HOSTS, deadline: float = inf) -> Any:
        """Return the file's bytes, or the object that a Python program passed. A file on another server is fetched from
        `hosts` until `deadline`."""
        value, where = self.value, self.where
        if self.is_remote and hosts:
            return hosts.fetch(value, limits.max_image_bytes, deadline, where, self.modality)
        if isinstance(value, str) and self.kind is None:
            return read_url(value, limits, where, self.modality)
        if isinstance(value, str):
            return read_typed(value, self.kind, limits, where, self.modality)
        if isinstance(value, (bytes, bytearray)):
            return bytes(value)
        if isinstance(value, Path):
            return _read_file(value, limits, where)
        return value


def source_of(part: Mapping[str, Any], where: str) -> Source | None:
    """Return the media file of a content part; None for any other part. The part may be OpenAI's `image_url`,
    `input_audio` or `input_image`, Anthropic's `image` with a `source`, or vLLM's `audio_url` or `video_url`. In
    Python, it may also be `image`, `audio` or `video` with the object itself."""
    modality = OF_PARTS.get(str(part.get("type")))
    if modality is None:
        return None
    if part.get("file_id") is not None:
        raise UnsupportedFeature(
            f"{where} names a file; this server stores no files: send the {WORDS[modality][0]} itself", where
        )
    given = part.get("source")
    if isinstance(given, Mapping):
        return _of_source(given, where, modality)
    value: Any = part.get(f"{modality}_url", part.get(modality, part.get(f"input_{modality}")))
    detail = part.get("detail")
    if isinstance(value, Mapping) and "data" in value:
        return _of_data(value, where, modality)
    if isinstance(value, Mapping):
        value, detail = value.get("url"), value.get("detail", detail)
    if value is None or isinstance(value, (int, float, Mapping)):
        raise MediaRefused(f"{where} has no {WORDS[modality][0]}; it needs {modality}_url or source", where)
    return Source(value, where, is_low=detail == "low", modality=modality)


def _of_source(given: Mapping[str, Any], where: str, modality: str) -> Source:
    kind, data, url = given.get("type"), given.get("data"), given.get("url")
    if kind == "base64" and isinstance(data, str):
        return Source(data, where, str(given.get("media_type")), modality=modality)
    if kind == "url" and isinstance(url, str):
        return Source(url, where, modality=modality)
    raise MediaRefused(f"{where}.source must have the type base64, with media_type and data", where)


def _of_data(given: Mapping[str, Any], where: str, modality: str) -> Source:
    """Return the file that is given in OpenAI's form `{"data": base64, "format": "wav"}`."""
    data, form = given.get("data"), given.get("format")
    if not isinstance(data, str) or not isinstance(form, str):
        raise MediaRefused(f"{where}.input_{modality} must have data in base64, and its format", where)
    return Source(data, where, f"{modality}/{form.lower()}", modality=modality)


def has_remote(messages: Iterable[Any]) -> bool:
    """Return whether any file in the messages has to be fetched from another server. Invalid parts are ignored here,
    and raise an error when they are read."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    lists = (content for content in contents if isinstance(content, Sequence) and not isinstance(content, str))
    return any(_is_remote_part(part) for content in lists for part in content)


def _is_remote_part(part: Any) -> bool:
    try:
        source = source_of(part, "") if isinstance(part, Mapping) else None
    except InvalidRequest:
        return False
    return source is not None and source.is_remote


def _read_file(path: Path, limits: MediaLimits, where: str) -> bytes:
    """Read a local file that a Python program named. Clients of a server cannot name local files."""
    try:
        with path.open("rb") as file:
            return file.read(limits.max_image_bytes + 1)
    except OSError as error:
        raise MediaRefused(f"{where}: {path} cannot be read: {error.strerror}", where) from None


def read_url(url: str, limits: MediaLimits, where: str = "image_url", modality: str = IMAGE) -> Any:
    """Return the bytes of the file in a `data:` URL, or a list with the bytes of each frame of a video."""
    if url[: len(_PREFIX)].lower() != _PREFIX:
        scheme = url.partition(":")[0][:16]
        raise UnsupportedFeature(
            f"{where} is a URL with the scheme {short_repr(scheme)}, which this server does not fetch: send the "
            f"{WORDS[modality][0]} itself, as data:{modality}/...;base64,...",
            where,
        )
    head, comma, text = url.partition(",")
    kind, _, encoding = head[len(_PREFIX) :].partition(";")
    if not comma or encoding.rpartition(";")[2].strip().lower() != "base64":
        raise MediaRefused(f"{where} must be data:{modality}/...;base64,...", where)
    return read_typed(text, kind, limits, where, modality)


def read_typed(text: str, kind: str | None, limits: MediaLimits, where: str, modality: str) -> Any:
    """Return the bytes of a file in base64. If the text has several frames of a video, separated by commas, return a
    list of the bytes of each frame."""
    if modality != VIDEO or kind is None or VIDEO_FORMATS.get(kind.strip().lower()) != "frames":
        return read_base64(text, kind, limits, where, modality)
    if (count := text.count(",") + 1) > limits.max_frames:
        raise MediaRefused(f"{where} has {count} frames; at most {limits.max_frames}", where)
    return [read_base64(frame, None, limits, f"{where}, frame {i}") for i, frame in enumerate(text.split(","))]


def read_base64(text: str, kind: str | None, limits: MediaLimits, where: str = "image", modality: str = IMAGE) -> bytes:
    """Return the bytes of base64 text that is declared as a file of `kind`, such as image/png."""
    types = _TYPES[modality]
    if kind is not None and kind.strip().lower() not in types:
        raise MediaRefused(f"{where} is of type {short_repr(kind)}; must be one of {', '.join(types)}", where)
    if len(text) > 4 * limits.max_image_bytes // 3 + 4:
        raise MediaRefused(f"{where} has {len(text)} characters; a file may have {limits.max_image_bytes} bytes", where)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise MediaRefused(f"{where} is not valid base64", where) from None
    if not data:
        raise MediaRefused(f"{where} is empty", where)
    return data
