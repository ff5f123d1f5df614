"""Items of type `compaction`: a summary of the conversation, which its client keeps and sends back unchanged.

In spite of the field's name the summary is not encrypted: the client has read the whole conversation, and a returned
summary counts as the client's text.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from bridle.errors import InvalidRequest

#: What a summary begins with in its packed form, so that those of other servers are told apart.
_MARK = "bridle-summary:"
_TITLE = "Summary of the conversation so far:\n"


def packed(summary: str) -> str:
    """A summary as `encrypted_content`."""
    return _MARK + base64.urlsafe_b64encode(summary.encode()).decode()


def unpacked(content: Any, where: str) -> str:
    """Return the text of an earlier conversation's summary for the model. Raises `InvalidRequest`."""
    try:
        if isinstance(content, str) and content.startswith(_MARK):
            return _TITLE + base64.urlsafe_b64decode(content.removeprefix(_MARK)).decode()
    except (binascii.Error, ValueError):
        pass
    raise InvalidRequest(f"{where}.encrypted_content is not from here; send what /v1/responses/compact gave", where)
