"""Pictures as they are written in requests: `data:` URLs and base64. Nothing is fetched and no file is opened.

Every refusal has a sentence of its own, which says nothing of what the bytes hold.
"""

from __future__ import annotations

import base64
import binascii

from bridle.errors import MediaRefused, UnsupportedFeature
from bridle.media.limits import FORMATS, MediaLimits
from bridle.shown import shown

_PREFIX = "data:"


def read_url(url: str, limits: MediaLimits, where: str = "image_url") -> bytes:
    """The bytes of a `data:` URL."""
    if url[: len(_PREFIX)].lower() != _PREFIX:
        scheme = url.partition(":")[0][:16]
        raise UnsupportedFeature(
            f"{where} is a URL of the kind {shown(scheme)}; this server fetches nothing: send the picture itself, as "
            "data:image/...;base64,...",
            where,
        )
    head, comma, text = url.partition(",")
    kind, _, encoding = head[len(_PREFIX) :].partition(";")
    if not comma or encoding.strip().lower() != "base64":
        raise MediaRefused(f"{where} must be data:image/...;base64,...", where)
    return read_base64(text, kind, limits, where)


def read_base64(text: str, kind: str | None, limits: MediaLimits, where: str = "image") -> bytes:
    """The bytes behind base64 that is said to hold a picture of `kind`, such as image/png."""
    if kind is not None and kind.strip().lower() not in FORMATS:
        raise MediaRefused(f"{where} is of type {shown(kind)}; must be one of {', '.join(FORMATS)}", where)
    if len(text) > 4 * limits.max_image_bytes // 3 + 4:
        raise MediaRefused(
            f"{where} has {len(text)} characters; its file may have {limits.max_image_bytes} bytes", where
        )
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise MediaRefused(f"{where} is not valid base64", where) from None
    if not data:
        raise MediaRefused(f"{where} is empty", where)
    return data
