"""Recent answers of a model that have tool calls. The exact tokens of these answers are kept, so that the next prompt
can begin with the same tokens.

A client sends an answer back as text and tool calls. A chat template may write an answer differently from the model.
Without the exact tokens, the KV of an answer that the template writes differently could not be reused. The cache finds
an answer by the ids of its tool calls, which are unique. The number, the bytes and the lifetime of the entries are
limited, and users have fair shares. This module uses no chat templates and no wire formats.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from bridle.outputs import ChatMessage, ToolCall
from bridle.serving.tenancy.per_user_store import PerUserStore, StoreBounds

#: Limits of one model's cache: answers of all users and of one, bytes of all users and of one.
_BOUNDS = 4_096, 256, 64 << 20, 32 << 20


@dataclass(frozen=True, slots=True)
class CachedToolCall:
    """An answer with tool calls. `prompt` are the tokens before the answer, and `seal` is a hash of the prompt's text.
    `tokens` and `text` belong to the answer; `message` is the answer that the client received. `request_id` is the
    request that computed the answer and whose KV was retained."""

    request_id: str
    prompt_chars: int
    seal: bytes
    prompt: array[int]
    tokens: array[int]
    text: str
    message: ChatMessage

    @property
    def num_bytes(self) -> int:
        told = self.message
        texts = (self.text, told.content, told.thoughts, *(part for call in told.calls for part in _parts(call)))
        return 4 * sum(map(len, texts)) + self.prompt.itemsize * (len(self.prompt) + len(self.tokens))


def _parts(call: ToolCall) -> tuple[str, str, str]:
    return call.name, call.id, call.arguments


def seal_of(text: str) -> bytes:
    """Return the hash of a text."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class ToolCallTokenCache:
    """Keeps answers for `seconds` seconds. Safe from any thread."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._store: PerUserStore[CachedToolCall] = PerUserStore(StoreBounds(seconds, *_BOUNDS), clock)

    def __len__(self) -> int:
        return len(self._store)

    def keep(
        self,
        user: str,
        request_id: str,
        rendered: str,
        prompt: Sequence[int],
        tokens: Sequence[int],
        text: str,
        message: ChatMessage,
    ) -> None:
        """Store an answer with tool calls. `rendered` is the text of the answer's prompt."""
        if not message.calls:
            return
        own = array("i", prompt), array("i", tokens)
        entry = CachedToolCall(request_id, len(rendered), seal_of(rendered), *own, text, message)
        self._store.keep(user, message.calls[0].id, entry, entry.num_bytes)

    def find(self, user: str, call_id: object) -> CachedToolCall | None:
        """Return the answer of this user whose first tool call has this id, or None."""
        return self._store.find(user, call_id) if isinstance(call_id, str) else None
