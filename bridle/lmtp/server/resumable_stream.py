"""Passes the answers of a stream to its connection, and stores those of a stream with a key.

A `ResumableStream` outlives connections. Without a connection, its stream continues for a while and its answers are
stored. A client that connects again gets each missed answer once. Streams, answers and time are bounded.
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

#: The owner of a stream: a user, and the key that the user's client chose.
Key = tuple[str, str]


class StreamOwner(Protocol):
    """The streams of one connection, as their relays see them."""

    def put(self, stream: Stream, answer: StreamAnswer) -> None: ...
    def release(self, stream: Stream) -> None: ...

    @property
    def room(self) -> asyncio.Event: ...


class StreamRelay:
    """Relay of one stream's answers to `stream` of the connection that `streams` has, or None while no
    connection is attached. `stop` ends the stream's task."""

    def __init__(self, streams: StreamOwner, stream: Stream) -> None:
        self.streams: StreamOwner | None = streams
        self.stream = stream
        self.stop: Callable[[], object] = lambda: None

    def put(self, answer: StreamAnswer) -> None:
        """Pass on the next answer."""
        if self.streams is not None:
            self.streams.put(self.stream, answer)

    def end(self) -> None:
        """Record that the last answer has come."""

    @property
    def is_writable(self) -> bool:
        """Return whether the client reads fast enough. A disconnected client holds up nothing."""
        return self.streams is None or self.streams.room.is_set()

    async def wait_writable(self) -> None:
        """Wait while the client reads too slowly. There is no wait for a disconnected client."""
        if self.streams is not None:
            await self.streams.room.wait()

    def detach(self) -> None:
        """Record that the connection is lost."""
        self.streams = None
        self.stop()


class ResumableStream(StreamRelay):
    """A relay that remembers its answers and can be attached again."""

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
        """Return whether the stream has ended or is detached, so that only a returning client needs it."""
        return self.is_over or self.streams is None

    def put(self, answer: StreamAnswer) -> None:
        answer.position = self.num_forgotten + len(self.log)
        if self.streams is not None:  # it may be attached to another stream than at first
            answer.stream_id = self.stream.id
        self.log.append(answer)
        self._memory.note_answer(self)
        super().put(answer)

    def end(self) -> None:
        self.is_over = True
        last = self.log[-1] if self.log else None
        if isinstance(last, Failure) and (last.retryable or last.position == 0):
            self._memory.drop(self)  # the client may ask again, and must not get the same error
        else:
            self._memory.note_idle(self)

    def detach(self) -> None:
        self.streams = None
        if not self.is_over:
            self._memory.note_idle(self)

    def attach(self, streams: StreamOwner, stream: Stream, position: int) -> None:
        """Continue on another stream of a connection, from answer `position` on. Raises `UnknownStream` if that answer
        is forgotten."""
        end = self.num_forgotten + len(self.log)
        if not self.num_forgotten <= position <= end:
            raise UnknownStream(
                f"position is {position}; answers {self.num_forgotten} to {end} of this stream are available",
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
        """Forget the oldest answer; returns its size."""
        self.num_forgotten += 1
        return _size(self.log.popleft())


@dataclass(slots=True)
class ReplayBuffer:
    """The keyed streams of a server. Used on one event loop."""

    settings: LmtpSettings
    _relays: dict[Key, ResumableStream] = field(default_factory=dict)
    _size: int = 0

    def __len__(self) -> int:
        return len(self._relays)

    def find(self, key: Key) -> ResumableStream | None:
        """The stream of that key, running or over."""
        return self._relays.get(key)

    def get(self, key: Key) -> ResumableStream:
        """The stream of that key. Raises `UnknownStream`."""
        relay = self._relays.get(key)
        if relay is None:
            raise UnknownStream(f"no stream with key {key[1]!r} is known here; it may have expired", "key")
        return relay

    def same(self, key: Key, asked: Generate) -> ResumableStream | None:
        """Return the stream that the same request began before; None if there is none. Raises `InvalidRequest` if
        another request used that key."""
        relay = self._relays.get(key)
        if relay is None:
            return None
        if _content(asked) != relay.content:
            raise InvalidRequest(f"key {key[1]!r} belongs to another request; choose a new key", "key")
        return relay

    def add(self, streams: StreamOwner, stream: Stream, key: Key, asked: Generate) -> ResumableStream:
        """Remember a new stream."""
        relay = self._relays[key] = ResumableStream(streams, stream, key, _content(asked), self)
        return relay

    def note_answer(self, relay: ResumableStream) -> None:
        """Note a new answer. If all answers exceed the budget, this stream forgets its oldest ones first."""
        self._size += _size(relay.log[-1])
        while self._size > self.settings.max_replay_size and relay.log:
            self._size -= relay.forget()

    def note_idle(self, relay: ResumableStream) -> None:
        """Record that the stream has no connection: it is kept for its client's return for a limited time."""
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
        """Forget a stream; it ends if it still runs and no connection is attached."""
        if self._relays.get(relay.key) is relay:
            del self._relays[relay.key]
        self.note_busy(relay)
        while relay.log:
            self._size -= relay.forget()
        if not relay.is_over and relay.streams is None:
            relay.stop()

    def clear(self) -> None:
        """Forget everything."""
        for relay in list(self._relays.values()):
            self.drop(relay)


def _size(answer: StreamAnswer) -> int:
    """The size of an answer in memory: one, and one for each alternative that it names. A record of a trace is about as
    large as eight of these."""
    if isinstance(answer, Token):
        return 1 + len(answer.top_logprobs or ())
    return 1 + 8 * len(answer.data.get("records", ())) if isinstance(answer, EventMessage) else 1


def _content(asked: Generate) -> bytes:
    """Return a digest that identifies a request. Prompts can be long, so the request itself is not kept."""
    text = repr(replace(asked, stream_id=0, position=0))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass")).digest()
