"""The router's end of tool calls: makes each call of a replica's controller only once, even if the replica is lost.

If a replica is lost, its outputs begin again on another replica and repeat their calls. So the calls of an unfinished
request are kept with their answers. A repeated call gets the first call's answer, or waits for it. The size of stored
answers is limited; a request that exceeds the limit cannot begin again.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from bridle.controller_tools import Call, ToolCallContext, ToolExecutor, ToolLimits, ToolSession
from bridle.distributed.tool_messages import ToolAnswered, ToolAsked, ToolGivenUp, sendable
from bridle.engine.request import Request
from bridle.errors import ControllerError, InvalidRequest

#: Maximum characters of stored answers, for one request and for all requests.
MAX_KEPT, MAX_KEPT_OF_ALL = 8 << 20, 256 << 20
#: Maximum bytes of arguments or results that fit into a message with its other fields.
_MAX_MESSAGE_BYTES = 32 << 20


#: Identifies a replica by its number or its address.
Replica = TypeVar("Replica", bound=Hashable)
_Named = TypeVar("_Named", contravariant=True)


class AnswerSender(Protocol[_Named]):
    """Sends an answer to a replica."""

    def __call__(self, replica: _Named, message: ToolAnswered, /) -> None: ...


@dataclass(slots=True, eq=False)
class _Made:
    """A tool call that was made. `asker` is the replica and the number that it gave the call. `asker` is None after the
    replica was lost, until another replica repeats the call."""

    key: tuple[Any, ...]
    call: Call
    asker: tuple[Any, int] | None
    size: int | None = None  # of the stored answer, once there is one


@dataclass(slots=True)
class _Book:
    """The tool calls of one request, in order."""

    callers: dict[str, ToolSession] = field(default_factory=dict)
    made: list[_Made] = field(default_factory=list)
    num_kept: int = 0
    is_whole: bool = True

    def find(self, key: tuple[Any, ...]) -> _Made | None:
        """Return the first stored call with this key that no replica has repeated yet."""
        return next((made for made in self.made if made.asker is None and made.key == key), None)


class ReplicaCalls(Generic[Replica]):
    """The tool calls of all requests. `lock` is the router's lock. All methods must be called with the lock held. When
    a call ends, this class acquires the lock itself."""

    def __init__(self, desk: ToolExecutor, send: AnswerSender[Replica], lock: threading.RLock) -> None:
        self._desk, self._send, self._lock = desk, send, lock
        self.books: dict[str, _Book] = {}
        self.asked: dict[tuple[Replica | None, int], _Made] = {}
        self.num_kept = 0

    def ask(self, replica: Replica, request: Request, message: ToolAsked) -> None:
        """Start a replica's call, or find the earlier equal call."""
        book, asker = self.books.setdefault(request.id, _Book()), (replica, message.number)
        key = (message.request_id, message.name, message.arguments, message.timeout)
        made = book.find(key)
        if made is not None:
            made.asker = asker
            if message.call_id and not made.call.is_done:
                self._desk.take_answers(message.call_id, request.tenant, made.call)
        else:
            caller = book.callers.get(message.request_id)
            if caller is None:
                behalf = ToolCallContext(request.tenant, request.client_tools, request.id)
                caller = book.callers[message.request_id] = ToolSession(self._desk, request.tools, behalf)
            arguments = msgspec.json.decode(message.arguments)
            made = _Made(key, caller.call(message.name, arguments, message.timeout, message.call_id), asker)
            book.made.append(made)
        self.asked[asker] = made
        self._follow(request.id, made, asker)

    def _follow(self, request_id: str, made: _Made, asker: tuple[Replica, int]) -> None:
        """When the call ends, send the answer to the replica that waits for it."""

        def tell() -> None:
            with self._lock:
                call = made.call
                answer = sendable(call.text if call.error is None else "")
                self._keep(request_id, made, len(answer))
                if self.asked.pop(asker, None) is not None:
                    self._send(asker[0], ToolAnswered(asker[1], answer, call.error and sendable(call.error)))

        made.call.when_done(tell)

    def _keep(self, request_id: str, made: _Made, size: int) -> None:
        """Count the stored answers of a request. If the answers exceed the limit, all answers of the request are
        dropped."""
        book = self.books.get(request_id)
        if book is None or made.size is not None:
            return
        made.size = size
        book.num_kept += size
        self.num_kept += size
        if not book.is_whole or book.num_kept > MAX_KEPT or self.num_kept > MAX_KEPT_OF_ALL:
            self.num_kept -= book.num_kept
            book.num_kept, book.is_whole = 0, False
            book.made = [each for each in book.made if each.size is None]

    def give_up(self, replica: Replica, message: ToolGivenUp) -> None:
        """Cancel a call whose answer is no longer needed."""
        made = self.asked.pop((replica, message.number), None)
        if made is not None:
            made.call.cancel()

    def begin_again(self, request_id: str) -> ControllerError | None:
        """Prepare a request to begin again on another replica. Returns an error if the request would repeat calls whose
        answers were dropped."""
        book = self.books.get(request_id)
        if book is None:
            return None
        for made in book.made:
            self.asked.pop(made.asker or (None, -1), None)
            made.asker = None
        if book.is_whole:
            return None
        return ControllerError(
            f"the request lost its replica, and the answers of its tools had more than the {MAX_KEPT} characters that "
            "are kept: it cannot begin again without calling them a second time"
        )

    def forget(self, request_id: str) -> None:
        """Drop the calls of a finished request."""
        book = self.books.pop(request_id, None)
        if book is None:
            return
        self.num_kept -= book.num_kept
        for made in book.made:
            self.asked.pop(made.asker or (None, -1), None)
            made.call.cancel()


def check_limits(limits: ToolLimits) -> None:
    """Raise `InvalidRequest` for limits that exceed the size of a message to a replica."""
    for name in ("max_argument_bytes", "max_result_bytes"):
        if getattr(limits, name) > _MAX_MESSAGE_BYTES:
            raise InvalidRequest(
                f"{name} is {getattr(limits, name)}; with replicas it must be at most {_MAX_MESSAGE_BYTES}", "tools"
            )
