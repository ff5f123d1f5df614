"""The server's side of one LMTP connection as a state machine: its input are messages, its output are actions. It does
no I/O.

A session knows which streams are open, and which answers each stream may still get. The caller passes every message to
`receive`, which returns the actions to execute. The caller passes every answer to `put`, which rejects answers of ended
streams. So each stream ends exactly once, even if the stream's task is cancelled, fails or is late.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from bridle.errors import BridleError, EngineClosed, InternalError, Overloaded, ProtocolError, RequestCancelled
from bridle.lmtp import messages as m
from bridle.lmtp.decoding import decode_request
from bridle.lmtp.failures import error_text, failure_of


class SessionState(Enum):
    """The state of a connection. In `DRAINING`, open streams finish and new streams are refused."""

    OPEN = "open"
    DRAINING = "draining"
    CLOSED = "closed"


class StreamState(Enum):
    """The state of a stream: requested, answering, or ended."""

    OPENING = "opening"
    RUNNING = "running"
    ENDED = "ended"


_STREAMING = ("GENERATE", "SCORE", "RESUME")
_SESSION_STEPS = {
    SessionState.OPEN: (SessionState.DRAINING, SessionState.CLOSED),
    SessionState.DRAINING: (SessionState.CLOSED,),
    SessionState.CLOSED: (),
}
_STREAM_STEPS = {
    StreamState.OPENING: (StreamState.RUNNING, StreamState.ENDED),
    StreamState.RUNNING: (StreamState.ENDED,),
    StreamState.ENDED: (),
}


@dataclass(eq=False, slots=True)
class Stream:
    """One stream of a connection. `num_branches` counts the branches without a finish reason."""

    id: m.StreamId
    state: StreamState = StreamState.OPENING
    num_branches: int = 1

    @property
    def is_open(self) -> bool:
        return self.state is not StreamState.ENDED

    def enter(self, state: StreamState) -> None:
        if state not in _STREAM_STEPS[self.state]:
            raise InternalError(
                f"stream {self.id!r} cannot change from state {self.state.value} to state {state.value}"
            )
        self.state = state


# -- actions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Begin the work of a stream."""

    stream: Stream
    request: m.Generate | m.Score


@dataclass(frozen=True, slots=True)
class Reattach:
    """Continue a stream whose task began before."""

    stream: Stream
    request: m.Resume


@dataclass(frozen=True, slots=True)
class StopStream:
    """Stop a stream that no client reads any more. `is_lost` means that the connection was lost, so the stream may be
    resumed."""

    stream: Stream
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class Describe:
    """Answer a MODEL_INFO request at once."""

    request: m.ModelInfo


@dataclass(frozen=True, slots=True)
class DefineBuffer:
    """Create or delete a buffer."""

    request: m.Buffer


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """Pass a client's answer on to a tool call."""

    request: m.ToolResult


@dataclass(frozen=True, slots=True)
class Send:
    """Send an answer to the client."""

    answer: m.Answer


Action: TypeAlias = Start | Reattach | StopStream | Describe | DefineBuffer | AnswerCall | Send


class Session:
    """The state of one connection, which may have at most `max_streams` open streams."""

    def __init__(self, max_streams: int = 1024) -> None:
        self.state = SessionState.OPEN
        self.is_extended = False  # the client knows the extensions
        self._max_streams = max_streams
        self._streams: dict[m.StreamId, Stream] = {}

    @property
    def num_streams(self) -> int:
        """Return the number of open streams."""
        return len(self._streams)

    # -- messages from the client ----------------------------------------------------------------------------

    def receive_line(self, line: str) -> list[Action]:
        """Decode a message and return the actions for it, in order."""
        return self.receive(decode_request(line))

    def receive(self, message: m.Request | m.Rejected) -> list[Action]:
        """Return the actions for a message, in order."""
        if self.state is SessionState.CLOSED:
            return []
        match message:
            case m.Generate() | m.Score() | m.Resume():
                return self._open(message)
            case m.ModelInfo():
                self.is_extended = self.is_extended or message.is_extended
                return [Describe(message)]
            case m.Cancel():
                return self._cancel(message.stream_id)
            case m.Buffer():
                return [DefineBuffer(message)]
            case m.ToolResult():
                return [AnswerCall(message)]
            case m.Rejected():
                return self._reject(message)

    def _open(self, request: m.Generate | m.Score | m.Resume) -> list[Action]:
        known = self._streams.get(request.stream_id)
        if known is not None:  # with one id, the client could not assign answers to the two streams
            return self._break_off(
                known, ProtocolError(f"stream_id {known.id!r} is in use; both of its requests are ended")
            )
        if self.state is SessionState.DRAINING and not isinstance(request, m.Resume):
            return [
                Send(failure_of(request.stream_id, EngineClosed("the server is shutting down; connect to another one")))
            ]
        if len(self._streams) >= self._max_streams:
            full = Overloaded(f"the connection has {len(self._streams)} open streams; at most {self._max_streams}")
            return [Send(failure_of(request.stream_id, full))]
        stream = self._streams[request.stream_id] = Stream(request.stream_id)
        return [Reattach(stream, request) if isinstance(request, m.Resume) else Start(stream, request)]

    def _cancel(self, stream_id: m.StreamId) -> list[Action]:
        stream = self._streams.get(stream_id)
        if stream is None:  # the stream has already ended, which the client could not know
            return []
        return self._break_off(stream, RequestCancelled("the stream was cancelled by its client"))

    def _reject(self, rejected: m.Rejected) -> list[Action]:
        """Return the actions for an invalid message. Clients expect a TOKEN as the answer if the message is about a
        stream, otherwise a MSG."""
        stream_id, error = rejected.stream_id, rejected.error
        if stream_id is None or rejected.kind not in _STREAMING:
            info = m.UNAVAILABLE if rejected.kind == "MODEL_INFO" else None
            return [Send(m.Msg(stream_id=stream_id, model_info=info, error=error_text(error), code=error.code))]
        known = self._streams.get(stream_id)
        return self._break_off(known, error) if known is not None else [Send(failure_of(stream_id, error))]

    def _break_off(self, stream: Stream, error: BridleError) -> list[Action]:
        return [StopStream(stream), *self.fail(stream, error)]

    # -- answers to the client -------------------------------------------------------------------------------

    def put(self, stream: Stream, answer: m.StreamAnswer) -> bool:
        """Return whether `answer` may be sent as the next answer of its stream. An answer that ends the stream changes
        the stream's state."""
        if not stream.is_open or self.state is SessionState.CLOSED:
            return False
        match answer:
            case m.Token():
                stream.num_branches -= answer.finish_reason is not None
            case m.Failure():
                stream.num_branches = 0
            case m.EventMessage():
                stream.num_branches += answer.event == "fork"
                return True
        if stream.num_branches == 0:
            self._end(stream)
        elif stream.state is StreamState.OPENING:
            stream.enter(StreamState.RUNNING)
        return True

    def fail(self, stream: Stream, error: BridleError) -> list[Action]:
        """End a stream with an error, if the stream is open."""
        failure = failure_of(stream.id, error)
        return [Send(failure)] if self.put(stream, failure) else []

    def release(self, stream: Stream) -> None:
        """End a stream without an answer, because another connection continues it."""
        if stream.is_open:
            self._end(stream)

    def _end(self, stream: Stream) -> None:
        stream.enter(StreamState.ENDED)
        if self._streams.get(stream.id) is stream:
            del self._streams[stream.id]

    # -- the whole connection --------------------------------------------------------------------------------

    def drain(self, seconds: float) -> list[Action]:
        """Refuse new streams. Open streams have `seconds` to finish."""
        if self.state is not SessionState.OPEN:
            return []
        self._enter(SessionState.DRAINING)
        return [Send(m.EventMessage(event="draining", data={"seconds": seconds}))] if self.is_extended else []

    def fail_all(self, error: BridleError) -> list[Action]:
        """End every open stream with an error. The connection stays open."""
        return [action for stream in list(self._streams.values()) for action in self._break_off(stream, error)]

    def close(self) -> list[Action]:
        """Record that the connection is lost, so that no further answer is sent. Idempotent."""
        if self.state is SessionState.CLOSED:
            return []
        streams = list(self._streams.values())
        for stream in streams:
            self._end(stream)
        self._enter(SessionState.CLOSED)
        return [StopStream(stream, is_lost=True) for stream in streams]

    def _enter(self, state: SessionState) -> None:
        if state not in _SESSION_STEPS[self.state]:
            raise InternalError(f"a session cannot change from state {self.state.value} to state {state.value}")
        self.state = state
