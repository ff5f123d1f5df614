"""Passes the answers of a stream on to its connection, and stores the answers of a stream with a key.

A `ResumableStream` outlives connections. Without a connection, the stream continues for a limited time, and its answers
are stored. A client that connects again gets each missed answer once. The number of streams and stored answers is
limited.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from bridle.errors import InvalidRequest, UnknownStream
from bridle.lmtp.messages import EventMessage, Failure, Generate, StreamAnswer, Token
from bridle.lmtp.server.settings import LmtpSettings
from bridle.lmtp.session import Stream

#: The key of a stream: the user's name, and the key that the user's client chose.
Key = tuple[str, str]


class StreamOwner(Protocol):
    """Interface of one connection's streams, to which a `StreamRelay` passes answers."""

    def put(self, stream: Stream, answer: StreamAnswer) -> None: ...
    def release(self, stream: Stream) -> None: ...

    @property
    def room(self) -> asyncio.Event: ...


class StreamRelay:
    """Passes one stream's answers on to the connection's `stream`. `streams` has all streams of the connection; it is
    None without a connection. `stop` ends the stream's task."""

    def __init__(self, streams: StreamOwner, stream: Stream) -> None:
        self.streams: StreamOwner | None = streams
        self.stream = stream
        self.stop: Callable[[], object] = lambda: None

    def put(self, answer: StreamAnswer) -> None:
        """Pass the next answer on."""
        if self.streams is not None:
            self.streams.put(self.stream, answer)

    def end(self) -> None:
        """Record that the last answer was passed on."""

    @property
    def is_writable(self) -> bool:
        """Return whether the client reads fast enough; True for a disconnected client."""
        return self.streams is None or self.streams.room.is_set()

    async def wait_writable(self) -> None:
        """Wait while the client reads too slowly. For a disconnected client, return at once."""
        if self.streams is not None:
            await self.streams.room.wait()

    def detach(self) -> None:
        """Record that the connection is lost, and stop the stream's task."""
        self.streams = None
        self.stop()


class ResumableStream(StreamRelay):
    """A `StreamRelay` that stores its answers, so that another connection can continue the stream."""

    def __init__(self, streams: StreamOwner, stream: Stream, key: Key, content: bytes, memory: ReplayBuffer) -> None:
        super().__init__(streams, stream)
        self.key = key
        self.content = content
        self.log: deque[StreamAnswer] = deque()
        self.num_forgotten = 0
        self.is_over = False
        self.timer: asyncio.TimerHandle | None = None
        self._memory = memory

    @property
    def is_idle(self) -> bool:
        """Return whether the stream has ended or has no connection, so that only a returning client needs it."""
        return self.is_over or self.streams is None

    def put(self, answer: StreamAnswer) -> None:
        answer.position = self.num_forgotten + len(self.log)
        if self.streams is not None:  # the relay may be attached to a stream with another id
            answer.stream_id = self.stream.id
        self.log.append(answer)
        self._memory.note_answer(self)
        super().put(answer)

    def end(self) -> None:
        self.is_over = True
        last = self.log[-1] if self.log else None
        if isinstance(last, Failure) and (last.retryable or last.position == 0):
            self._memory.drop(self)  # the client may retry, and must not get the stored error
        else:
            self._memory.note_idle(self)

    def detach(self) -> None:
        self.streams = None
        if not self.is_over:
            self._memory.note_idle(self)

    def attach(self, streams: StreamOwner, stream: Stream, position: int) -> None:
        """Continue this stream as `stream` of another connection, from answer number `position` on. Raises
        `UnknownStream` if the answer with this number was dropped."""
        end = self.num_forgotten + len(self.log)
        if not self.num_forgotten <= position <= end:
            raise UnknownStream(
                f"position is {position}; must be from {self.num_forgotten} to {end}, the answers of this stream "
                "that are still stored",
                "position",
            )
        if self.streams is not None:
            self.streams.release(self.stream)
        self.streams, self.stream = streams, stream
        for answer in list(self.log)[position - self.num_forgotten :]:
            streams.put(stream, replace(answer, stream_id=stream.id))
        if not self.is_over:
            self._memory.note_busy(self)

    def forget(self) -> int:
        """Drop the oldest stored answer. Returns its size."""
        self.num_forgotten += 1
        return _size(self.log.popleft())


@dataclass(slots=True)
class ReplayBuffer:
    """All streams with keys of one server. Use the object in one event loop."""

    settings: LmtpSettings
    _relays: dict[Key, ResumableStream] = field(default_factory=dict)
    _size: int = 0

    def __len__(self) -> int:
        return len(self._relays)

    def find(self, key: Key) -> ResumableStream | None:
        """Return the running or ended stream with this `key`; None if there is none."""
        return self._relays.get(key)

    def get(self, key: Key) -> ResumableStream:
        """Return the stream with that key. Raises `UnknownStream`."""
        relay = self._relays.get(key)
        if relay is None:
            raise UnknownStream(f"no stream has the key {key[1]!r}; it may have expired", "key")
        return relay

    def same(self, key: Key, asked: Generate) -> ResumableStream | None:
        """Return the stream that an equal request with this key began; None if the key is new. Raises `InvalidRequest`
        if a different request used the key."""
        relay = self._relays.get(key)
        if relay is None:
            return None
        if _content(asked) != relay.content:
            raise InvalidRequest(f"the key {key[1]!r} belongs to another request; choose a new key", "key")
        return relay

    def add(self, streams: StreamOwner, stream: Stream, key: Key, asked: Generate) -> ResumableStream:
        """Create and store the relay of a new stream."""
        relay = self._relays[key] = ResumableStream(streams, stream, key, _content(asked), self)
        return relay

    def note_answer(self, relay: ResumableStream) -> None:
        """Record a new answer. If the stored answers of all streams exceed the limit, this stream drops its oldest
        answers."""
        self._size += _size(relay.log[-1])
        while self._size > self.settings.max_replay_size and relay.log:
            self._size -= relay.forget()

    def note_idle(self, relay: ResumableStream) -> None:
        """Record that the stream has no connection. The stream is kept for a limited time, so that its client can
        return."""
        if self._relays.get(relay.key) is not relay:
            return
        self.note_busy(relay)
        relay.timer = asyncio.get_running_loop().call_later(self.settings.resume_time, self.drop, relay)
        idle = [each for each in self._relays.values() if each.is_idle]
        if len(idle) > self.settings.max_detached:
            self.drop(idle[0])

    def note_busy(self, relay: ResumableStream) -> None:
        """Record that a connection is attached again."""
        if relay.timer is not None:
            relay.timer.cancel()
            relay.timer = None

    def drop(self, relay: ResumableStream) -> None:
        """Remove a stream. The task of a stream that still runs without a connection is stopped."""
        if self._relays.get(relay.key) is relay:
            del self._relays[relay.key]
        self.note_busy(relay)
        while relay.log:
            self._size -= relay.forget()
        if not relay.is_over and relay.streams is None:
            relay.stop()

    def clear(self) -> None:
        """Remove all streams."""
        for relay in list(self._relays.values()):
            self.drop(relay)


def _size(answer: StreamAnswer) -> int:
    """Return the size of an answer for the limit: one, plus one for each alternative token. A trace record counts as
    eight alternatives."""
    if isinstance(answer, Token):
        return 1 + len(answer.top_logprobs or ())
    return 1 + 8 * len(answer.data.get("records", ())) if isinstance(answer, EventMessage) else 1


def _content(asked: Generate) -> bytes:
    """Return a digest that identifies a request. The request itself is not stored, because prompts can be long."""
    text = repr(replace(asked, stream_id=0, position=0))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass")).digest()
