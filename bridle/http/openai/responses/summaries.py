"""Encodes items of type `compaction`: the summary of a conversation, which the client stores and sends back unchanged.

Despite its name, the field `encrypted_content` is not encrypted. The client knows the whole conversation, and a
returned summary counts as the client's text.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from bridle.errors import InvalidRequest

#: The prefix of a packed summary, which tells it from other servers' summaries.
_MARK = "bridle-summary:"
_TITLE = "Summary of the conversation so far:\n"


def packed(summary: str) -> str:
    """Encode a summary for the field `encrypted_content`."""
    return _MARK + base64.urlsafe_b64encode(summary.encode()).decode()


def unpacked(content: Any, where: str) -> str:
    """Decode the summary in `encrypted_content`, and add a title for the model. Raises `InvalidRequest`."""
    try:
        if isinstance(content, str) and content.startswith(_MARK):
            return _TITLE + base64.urlsafe_b64decode(content.removeprefix(_MARK)).decode()
    except (binascii.Error, ValueError):
        pass
    raise InvalidRequest(
        f"{where}.encrypted_content is not a summary from this server; send the value that /v1/responses/compact "
        "returned",
        where,
    )
