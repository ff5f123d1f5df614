"""Numbers that both requests and replies carry, with their bounds; and the names of our additions."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

#: Names of our additions to dialect 2, told in the reply to `tokens`.
EXTENSIONS = (
    "bias",
    "candidates",
    "constraints",
    "deadline_ms",
    "discard",
    "reply_ms",
    "retry_after",
    "sampling",
    "traceparent",
    "turns",
    "wait",
    "waits_for",
)

TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
SeqId = Annotated[int, Meta(ge=0, lt=2**62)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
