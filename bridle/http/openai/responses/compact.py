"""Makes a conversation shorter: what its user said last is kept, and the model writes a summary of everything."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from bridle.errors import InvalidRequest
from bridle.http.openai.responses.response_writer import begin, usage_of
from bridle.http.openai.responses.schemas import CompactBody
from bridle.http.openai.responses.stored import listed
from bridle.http.openai.responses.summaries import packed
from bridle.http.openai.schemas import JsonObjects
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle
from bridle.serving.outputs.response_store import ResponseStore

#: How long a summary may be unless the request says otherwise, and how much is kept of what the user said, as JSON.
SUMMARY_TOKENS = 1_024
KEPT_BYTES = 64 << 10
_ASK = (
    "Summarize our conversation so far for somebody who goes on with it and has not read it: what was asked for, what "
    "was decided and done, the facts and names that matter, and what is left to do. Write the summary alone."
)


async def compacted(body: CompactBody, serving: RequestLifecycle, book: ResponseStore) -> dict[str, Any]:
    """The shorter conversation. Raises `InvalidRequest`."""
    said = body.items(book, serving.identity.user)
    if not said:
        raise InvalidRequest("input is empty; there is nothing to compact", "input")
    asked = [*said, {"role": "user", "content": _ASK}]
    changes = {"input": asked, "tools": None, "tool_choice": None, "text": None, "stream": None}
    generation, turn = await begin(body.model_copy(update=changes), serving, SUMMARY_TOKENS)
    summary = turn.message(generation.parts[0].outputs[0].text).content
    name = serving.story.id
    item = {"type": "compaction", "id": f"cmp_{name}", "encrypted_content": packed(summary)}
    return {
        "id": f"resp_{name}",
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*_kept(said, name), item],
        "usage": usage_of(generation, turn),
    }


def _kept(said: JsonObjects, name: str) -> JsonObjects:
    """The user's last messages, as many as there is room for."""
    kept: JsonObjects = []
    room = KEPT_BYTES
    for number, item in reversed(list(enumerate(said))):
        if item.get("type", "message") != "message" or item.get("role") != "user":
            continue
        room -= len(msgspec.json.encode(item))
        if room < 0:
            break
        kept.append(listed(item, f"resp_{name}", number))
    return kept[::-1]
