"""What a model answered of late with tool calls: the exact tokens, so that the next prompt can begin with them.

A client sends an answer back as text and calls, and a chat template may write them in another way than the model did;
then nothing of the answer's KV could be used. The book knows answers by the ids of their calls, which nobody else has.
It is bounded in number and in bytes, fair among users, and forgets by time. Knows neither templates nor wire formats.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from bridle.outputs import ChatMessage

#: The bounds on what is remembered: answers and bytes of one model, and answers of one user.
MAX_ANSWERS, MAX_OF_USER, MAX_BYTES = 4_096, 256, 64 << 20
_OVERHEAD = 512  # of an entry, in bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with calls: the prompt that it follows, as the template wrote it (`seal` is a hash of that text) and as
    tokens; its own tokens and text; and what of it was told. `request_id` is what has parked its KV."""

    request_id: str
    prompt_chars: int
    seal: bytes
    prompt: array[int]
    tokens: array[int]
    text: str
    message: ChatMessage
    until: float

    @property
    def num_bytes(self) -> int:
        told = self.message
        texts = (
            len(self.text) + len(told.content) + len(told.thoughts) + sum(len(call.arguments) for call in told.calls)
        )
        return 4 * texts + self.prompt.itemsize * (len(self.prompt) + len(self.tokens)) + _OVERHEAD


def seal_of(text: str) -> bytes:
    """A hash of a text."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class AnswerBook:
    """Remembers answers for `seconds`. Any thread may call it."""

    def __init__(
        self,
        seconds: float,
        *,
        max_answers: int = MAX_ANSWERS,
        max_of_user: int = MAX_OF_USER,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = seconds
        self._max_answers, self._max_of_user, self._max_bytes = max_answers, max_of_user, max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._users: dict[str, OrderedDict[str, Answer]] = {}  # by user and call, the oldest first
        self.num_answers = self.num_bytes = 0

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
        """Remember an answer with calls to the prompt that was `rendered`."""
        if not self.seconds or not message.calls:
            return
        entry = Answer(
            request_id,
            len(rendered),
            seal_of(rendered),
            array("i", prompt),
            array("i", tokens),
            text,
            message,
            self._clock() + self.seconds,
        )
        with self._lock:
            self._expire()
            self._drop(user, message.calls[0].id)
            self._users.setdefault(user, OrderedDict())[message.calls[0].id] = entry
            self.num_answers += 1
            self.num_bytes += entry.num_bytes
            while len(self._users.get(user, ())) > self._max_of_user:
                self._drop_oldest(user)
            while self.num_answers > self._max_answers or self.num_bytes > self._max_bytes:
                self._drop_oldest(max(self._users, key=lambda each: len(self._users[each])))

    def find(self, user: str, call_id: object) -> Answer | None:
        """The answer of this user whose first call has the id."""
        with self._lock:
            self._expire()
            known = self._users.get(user)
            return known.get(call_id) if known is not None and isinstance(call_id, str) else None

    def _expire(self) -> None:
        now = self._clock()
        for user in list(self._users):
            while user in self._users and next(iter(self._users[user].values())).until <= now:
                self._drop_oldest(user)

    def _drop_oldest(self, user: str) -> None:
        self._drop(user, next(iter(self._users[user])))

    def _drop(self, user: str, call_id: str) -> None:
        known = self._users.get(user)
        entry = None if known is None else known.pop(call_id, None)
        if entry is None:
            return
        self.num_answers -= 1
        self.num_bytes -= entry.num_bytes
        if not self._users[user]:
            del self._users[user]
