"""Requests beside the steps: uploads, tags, instances. Any thread may call; replies come in any order."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from bridle.aici import protocol, replies
from bridle.aici.client.process import RuntimeProcess
from bridle.errors import ControllerError, ControllerUnavailable, InvalidRequest, Overloaded, ProtocolError

#: How often the reader checks whether it should end, in seconds.
_LOOK = 0.25


class SideChannel:
    """Carries many calls at once over the side channel of one runtime process. It begins with `start` and ends with the
    process; then it calls `on_end` from its own thread."""

    def __init__(self, process: RuntimeProcess, on_end: Callable[[], None] = lambda: None) -> None:
        self._process = process
        self._on_end = on_end
        self._lock = threading.Lock()
        self._pending: dict[str, tuple[Future[Any], Any]] = {}
        self._closed = False
        self._reader = threading.Thread(target=self._read, name="bridle-aici-side", daemon=True)

    def start(self) -> SideChannel:
        """Begin to read replies."""
        self._reader.start()
        return self

    def call(self, request: protocol.Message, data_type: Any) -> Future[Any]:
        """Send a request. The future gives the reply's data, or raises `InvalidRequest` (the user's fault),
        `Overloaded` or `ControllerError`."""
        future: Future[Any] = Future()
        request.rid = secrets.token_hex(8)
        message = protocol.encode(request)
        if len(message) > self._process.link.side.max_message:
            limit = self._process.link.side.max_message
            future.set_exception(InvalidRequest(f"the message has {len(message)} bytes; at most {limit} fit"))
            return future
        with self._lock:
            if self._closed:
                future.set_exception(ControllerUnavailable("the control runtime is gone"))
                return future
            self._pending[request.rid] = future, data_type
            try:
                self._process.send(message, side=True)
            except ProtocolError as error:
                del self._pending[request.rid]
                future.set_exception(ControllerUnavailable(f"the control runtime does not listen: {error}"))
        return future

    def close(self) -> None:
        """Fail the calls that are under way and wait for the reader to end. Call this before the process's link is
        closed."""
        self._closed = True
        if self._reader.is_alive() and threading.current_thread() is not self._reader:
            self._reader.join()

    def _read(self) -> None:
        try:
            while not self._closed:
                reply = self._process.receive(_LOOK, side=True)
                if reply is not None:
                    self._resolve(reply)
        except ProtocolError:
            pass  # the process ended
        with self._lock:
            self._closed = True
            pending, self._pending = self._pending, {}
        for future, _ in pending.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(ControllerUnavailable("the control runtime ended during the call"))
        self._on_end()

    def _resolve(self, reply: bytes) -> None:
        rid = msgspec.json.decode(reply, type=_Rid).rid
        with self._lock:
            future, data_type = self._pending.pop(rid, (None, None))
        if future is None or not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(_data(replies.decode_reply(reply, data_type)))
        except (ProtocolError, ControllerError, InvalidRequest, Overloaded) as error:
            future.set_exception(error)


class _Rid(msgspec.Struct):
    rid: str = msgspec.field(name="$rid", default="")


def _data(message: replies.Ok[Any] | replies.Failure | replies.JsonFailure) -> Any:
    if isinstance(message, replies.Ok):
        return message.data
    if isinstance(message, replies.Failure) and isinstance(message.retry_after, float):
        raise Overloaded(message.error, message.retry_after)
    if isinstance(message, replies.Failure) and message.is_user_error:
        raise InvalidRequest(message.error, "controller")
    raise ControllerUnavailable(message.error)
