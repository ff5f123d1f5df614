"""The client's side of the protocol, without I/O: assigns answers to streams, and chooses the next messages.

A `ClientProtocol` outlives connections. `begin` returns the first messages of a new connection. When the server has
announced its features, `resume` returns the messages that continue the streams of the last connection. All methods
return messages to send, in order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from bridle.errors import BridleError, ConnectionLost, ProtocolError
from bridle.lmtp import messages as m
from bridle.lmtp.client.errors import error_of
from bridle.lmtp.client.stream_state import StreamProgress
from bridle.lmtp.client_decoding import decode_answers
from bridle.lmtp.encoding import encode_request

log = logging.getLogger(__name__)
_HELLO: Mapping[str, Any] = {"lmtp": {"version": 1}}


@dataclass(slots=True, eq=False)
class PendingCall:
    """A request that the server answers with one MSG. The message `request` gets a stream id when it is sent."""

    request: m.ModelInfo | m.Buffer | m.ToolResult
    wake: Callable[[], None] = lambda: None
    answer: m.Msg | None = None
    error: BridleError | None = None
    num_failures: int = 0  # connections that were lost while the request waited
    is_own: bool = False  # the client itself sent it; it is dropped with the connection
    has_failed: bool = False  # always False: it is sent again only on another connection

    @property
    def is_over(self) -> bool:
        return self.answer is not None or self.error is not None

    def fail(self, error: BridleError) -> None:
        """End the request with an error."""
        self.error = error
        self.wake()

    def give_up(self) -> None:
        """End the request because too many connections were lost."""
        self.fail(ConnectionLost(f"the connection was lost {self.num_failures} times in a row"))


@dataclass(slots=True)
class ClientProtocol:
    """The state of all open streams and calls. If `is_plain`, only messages of the original protocol are sent."""

    model: str
    is_plain: bool = False
    on_event: Callable[[m.EventMessage], None] = lambda event: None
    features: Mapping[str, Any] = field(default_factory=dict)
    _is_ready: bool = False  # the server has announced its features; until then, all items wait
    _waiting: list[StreamProgress | PendingCall] = field(default_factory=list)
    _open: dict[m.StreamId, StreamProgress | PendingCall] = field(default_factory=dict)
    _buffers: dict[str, m.Buffer] = field(default_factory=dict)  # named again on another connection
    _ids: count[int] = field(default_factory=lambda: count(1))
    num_answers: int = 0  # answers received, over all connections

    def __len__(self) -> int:
        return len(self._open) + len(self._waiting)

    @property
    def is_ready(self) -> bool:
        """Return whether the server has announced its features."""
        return self._is_ready

    def has(self, feature: str) -> bool:
        """Return whether the server has announced an extension."""
        return bool(self.features.get(feature))

    # -- connections -----------------------------------------------------------------------------------------

    def begin(self) -> tuple[PendingCall | None, list[str]]:
        """Return the first messages of a connection: a request for the server's features, unless the connection is
        plain."""
        self.lose()
        self._ids = count(1)
        if self.is_plain:
            return None, []
        hello = PendingCall(m.ModelInfo(stream_id=0, model=self.model, data=_HELLO), is_own=True)
        return hello, self._ask(hello)

    def resume(self, hello: PendingCall | None) -> list[str]:
        """Continue all streams, after the server has announced its features or did not answer in time."""
        self.features = {} if hello is None or hello.answer is None else m.features_of(hello.answer)
        self._is_ready = True
        waiting, self._waiting = self._waiting, []
        named = [line for buffer in self._buffers.values() for line in self._ask(PendingCall(buffer, is_own=True))]
        return named + [line for each in waiting for line in self._send(each, resumes=True)]

    def lose(self, max_failures: int | None = None) -> None:
        """Record that the connection is lost. A stream fails after more than `max_failures` losses in a row without an
        answer."""
        self._is_ready = False
        self._waiting += [each for each in self._open.values() if not each.is_own]
        self._open = {}
        for each in self._waiting if max_failures is not None else ():
            each.num_failures += 1
            if each.num_failures > (max_failures or 0):
                each.give_up()
        self._waiting = [each for each in self._waiting if not each.is_over]

    def fail(self, error: BridleError) -> None:
        """End all streams and calls with an error."""
        for each in (*self._waiting, *self._open.values()):
            each.fail(error)
        self._waiting, self._open, self._is_ready = [], {}, False

    # -- sending ---------------------------------------------------------------------------------------------

    def add(self, item: StreamProgress | PendingCall) -> list[str]:
        """Add a stream or call, and return the messages that begin it; no messages without a connection."""
        if not self._is_ready:
            self._waiting.append(item)
            return []
        return self._send(item)

    def drop(self, item: StreamProgress | PendingCall, *, cancels: bool = True) -> list[str]:
        """Remove a stream or call. If `cancels`, return the messages that cancel the stream or call on the server, if
        the server supports that."""
        if item in self._waiting:
            self._waiting.remove(item)
        ids = [stream_id for stream_id, each in self._open.items() if each is item]
        for stream_id in ids:
            del self._open[stream_id]
        if not (cancels and self.has("cancel") and isinstance(item, StreamProgress)):
            return []
        return [encode_request(m.Cancel(stream_id=stream_id)) for stream_id in ids]

    def _send(self, item: StreamProgress | PendingCall, *, resumes: bool = False) -> list[str]:
        if isinstance(item, PendingCall):
            return self._ask(item)
        stream_id = next(self._ids)
        self._open[stream_id] = item
        can_resume = self.has("resume")
        requests = (item.resume if resumes else item.begin)(stream_id, can_resume=can_resume)
        if item.is_over:
            del self._open[stream_id]
        return [encode_request(request) for request in requests]

    def _ask(self, question: PendingCall) -> list[str]:
        stream_id = next(self._ids)
        self._open[stream_id] = question
        return [encode_request(replace(question.request, stream_id=stream_id))]

    # -- receiving -------------------------------------------------------------------------------------------

    def receive(self, frame: str) -> tuple[list[StreamProgress], list[str]]:
        """Process a frame from the server. Returns the streams that must begin again because their attempt failed, and
        the messages to send."""
        try:
            answers = decode_answers(frame)
        except ProtocolError as error:
            log.warning("a frame from the server is invalid and was ignored: %s", error)
            return [], []
        self.num_answers += len(answers)
        failed: list[StreamProgress] = []
        lines: list[str] = []
        for answer in answers:
            item = self._find(answer.stream_id)
            if item is None:
                self._take_stray(answer)
                continue
            if not item.has_failed:  # otherwise a new attempt is pending
                lines += self._deliver(item, answer, failed)
        return failed, lines

    def _deliver(self, item: StreamProgress | PendingCall, answer: m.Answer, failed: list[StreamProgress]) -> list[str]:
        goes_on = isinstance(answer, m.Token) and answer.finish_reason is None
        self._take(item, answer)
        if isinstance(item, StreamProgress) and item.has_failed:
            failed.append(item)
        elif not item.is_over:
            return []
        return self.drop(item, cancels=goes_on)

    def _find(self, stream_id: m.StreamId | None) -> StreamProgress | PendingCall | None:
        if isinstance(stream_id, str) and stream_id.isdecimal() and stream_id not in self._open:
            stream_id = int(stream_id[:18])
        return None if stream_id is None else self._open.get(stream_id)

    def _take_stray(self, answer: m.Answer) -> None:
        if isinstance(answer, m.EventMessage):
            self.on_event(answer)
        elif isinstance(answer, m.Msg) and answer.error:
            log.warning("the server reports an error: %s", answer.error)

    def _take(self, item: StreamProgress | PendingCall, answer: m.Answer) -> None:
        if isinstance(answer, m.EventMessage) and answer.position is None:
            self.on_event(answer)
            item.wake()  # the server works, so the reader's timeout begins again
        elif isinstance(item, PendingCall):
            self._answer(item, answer)
        elif not isinstance(answer, m.Msg):
            item.accept(answer)
        elif answer.error is not None:  # the original server's format of errors
            item.accept(m.Failure(stream_id=0, error=answer.error, code=answer.code or "error"))

    def _answer(self, question: PendingCall, answer: m.Answer) -> None:
        if isinstance(answer, (m.Msg, m.Failure)) and answer.error is not None:
            question.fail(error_of(m.Failure(stream_id=0, error=answer.error, code=answer.code or "error")))
        elif isinstance(answer, m.Msg):
            request = question.request
            if question.is_own and isinstance(request, m.ModelInfo):  # also if the answer came too late for `resume`
                self.features = m.features_of(answer)
            if isinstance(request, m.Buffer):
                self._buffers.pop(request.name, None)
                if not request.drop:
                    self._buffers[request.name] = request
            question.answer = answer
            question.wake()
