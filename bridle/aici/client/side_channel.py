"""Sends requests in parallel to steps: uploads, tags, instances. Safe from any thread; replies come in any order. A
call without a reply within the process's `call_timeout` fails."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import msgspec

from bridle.aici import protocol, replies
from bridle.aici.client.process import RuntimeProcess
from bridle.errors import ControllerUnavailable, InvalidRequest, Overloaded, ProtocolError

T = TypeVar("T")
_log = logging.getLogger(__name__)
#: Seconds between two checks of the reader whether it should end and which calls are overdue.
_LOOK = 0.25


class SideChannel:
    """Makes concurrent calls over the side channel of one runtime process. The channel begins with `start`. When the
    process ends or sends an invalid reply, the channel's thread calls `on_end` with the reason."""

    def __init__(self, process: RuntimeProcess, on_end: Callable[[str], None] = lambda reason: None) -> None:
        self._process = process
        self._on_end = on_end
        self._lock = threading.Lock()
        self._pending: dict[str, _Call] = {}  # by request id; the oldest call first
        self._closed = False
        self._reader = threading.Thread(target=self._read, name="bridle-aici-side", daemon=True)

    def start(self) -> SideChannel:
        """Begin to read replies."""
        self._reader.start()
        return self

    def call(self, request: protocol.Message, data_type: type[T]) -> Future[T]:
        """Send a request. The future returns the reply's data, or raises `InvalidRequest` (a user's mistake),
        `Overloaded` or `ControllerError`. Every future completes."""
        future: Future[T] = Future()
        request.rid = secrets.token_hex(8)
        message = protocol.encode(request)
        if len(message) > self._process.link.side.max_message:
            limit = self._process.link.side.max_message
            future.set_exception(InvalidRequest(f"the message has {len(message)} bytes; at most {limit} fit"))
            return future
        with self._lock:
            if self._closed:
                future.set_exception(ControllerUnavailable("the control runtime has ended"))
                return future
            self._pending[request.rid] = _Call(future, data_type, time.monotonic() + self._process.config.call_timeout)
            try:
                self._process.send(message, side=True)
            except ProtocolError as error:
                del self._pending[request.rid]
                future.set_exception(ControllerUnavailable(f"the control runtime does not listen: {error}"))
        return future

    def close(self) -> None:
        """Fail the calls in progress and wait for the reader to end. Call this before the process's channels are
        closed."""
        self._closed = True
        if self._reader.is_alive() and threading.current_thread() is not self._reader:
            self._reader.join()

    def _read(self) -> None:
        reason = "its process ended"
        try:
            while not self._closed:
                reply = self._process.receive(_LOOK, side=True)
                if reply is not None:
                    self._resolve(reply)
                self._fail_overdue()
        except ProtocolError as error:
            reason = str(error)
        except Exception as error:  # a bug; without a reader the runtime cannot be used any more
            _log.exception("a reply of the control runtime could not be read")
            reason = f"a reply on its side channel could not be read: {error!r}"
        with self._lock:
            self._closed = True
            pending, self._pending = self._pending, {}
        for call in pending.values():
            _fail(call.future, "the control runtime ended during the call")
        self._on_end(reason)

    def _fail_overdue(self) -> None:
        now, overdue = time.monotonic(), []
        with self._lock:
            while self._pending and (oldest := next(iter(self._pending.items())))[1].due <= now:
                overdue.append(self._pending.pop(oldest[0]))
        for call in overdue:
            seconds = self._process.config.call_timeout
            _fail(call.future, f"the control runtime gave no answer within {seconds:g} s")

    def _resolve(self, reply: bytes) -> None:
        try:
            rid = msgspec.json.decode(reply, type=_Rid).rid
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"malformed reply of the control runtime on the side channel: {error}") from None
        with self._lock:
            call = self._pending.pop(rid, None)
        if call is None or not call.future.set_running_or_notify_cancel():
            return
        try:
            data = _data(replies.decode_reply(reply, call.data_type))
        except Exception as error:  # a bug must also be reported to the caller, which waits
            call.future.set_exception(error)
        else:
            call.future.set_result(data)


class _Call(NamedTuple):
    """A call that waits for its reply. `due` is the time at which the call fails, in seconds of the monotonic clock."""

    future: Future[Any]
    data_type: Any
    due: float


def _fail(future: Future[Any], message: str) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(ControllerUnavailable(message))


class _Rid(msgspec.Struct):
    rid: str = msgspec.field(name="$rid", default="")


def _data(message: replies.Ok[Any] | replies.ErrorReply | replies.JsonFailure) -> Any:
    if isinstance(message, replies.Ok):
        return message.data
    if isinstance(message, replies.ErrorReply) and isinstance(message.retry_after, float):
        raise Overloaded(message.error, message.retry_after)
    if isinstance(message, replies.ErrorReply) and message.is_user_error:
        raise InvalidRequest(message.error, "controller")
    raise ControllerUnavailable(message.error)
