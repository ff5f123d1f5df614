"""The client's state of one stream: the request, the answers so far, and the messages that continue it after a failure.

The module does no I/O and uses no clock. Each token enters `ready` once and in order, even if the stream begins again
or a server repeats answers.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from secrets import token_urlsafe
from typing import Protocol, TypeAlias

from bridle.errors import BridleError, ConnectionLost, ProtocolError
from bridle.lmtp.client.errors import error_of
from bridle.lmtp.messages import Buffer, EventMessage, Failure, Generate, Request, Resume, Score, StreamId, Token

Item: TypeAlias = Token | EventMessage
#: Only with these options, the next tokens do not depend on where the request began, so that a stream can be continued.
_MEMORYLESS = frozenset({"top_p", "top_k", "min_p", "repetition_penalty"})


class ClientTextState(Protocol):
    """Interface that converts tokens to text, for servers that send no text."""

    def push(self, token: int) -> str: ...
    def flush(self) -> str: ...


@dataclass(slots=True, eq=False)
class StreamProgress:
    """A GENERATE or SCORE request and its answers so far. Each attempt gets its own stream id; the id in `request` is
    not used."""

    request: Generate | Score
    wake: Callable[[], None] = lambda: None
    text_state: ClientTextState | None = None
    ready: deque[Item] = field(default_factory=deque)
    tokens: list[int] = field(default_factory=list)  # all tokens of branch 0
    finish_reason: str | None = None
    error: BridleError | None = None
    has_failed: bool = False  # the last attempt failed, so another one begins
    retry_after: float | None = None  # seconds to wait before that, if the server says so
    num_failures: int = 0  # failures in a row, without an answer in between
    is_own: bool = False  # see `PendingCall`
    _key: str | None = None
    _position: int = 0  # number of the next answer, if the server numbers answers
    _num_skipped: int = 0  # answers of this attempt that must repeat known tokens
    _is_resuming: bool = False
    _last_error: BridleError | None = None
    _branches: set[int] = field(default_factory=lambda: {0})  # the branches that have not ended

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def limit(self) -> int:
        """Return the maximum number of tokens of the stream; further tokens from the server are ignored."""
        if isinstance(self.request, Generate):
            return sys.maxsize if self.request.max_tokens is None else self.request.max_tokens
        return sys.maxsize if isinstance(self.request.scored, str) else len(self.request.scored)

    @property
    def has_branches(self) -> bool:
        return isinstance(self.request, Generate) and self.request.rewind == "event"

    # -- requests --------------------------------------------------------------------------------------------

    def begin(self, stream_id: StreamId, *, can_resume: bool) -> list[Request]:
        """Return the messages that begin the stream, or begin it again after a lost attempt."""
        request = self.request
        # The server may have received the request before. It keeps its key if the server did not know the key when the
        # client tried to resume the stream.
        keeps_key = self._is_resuming and not self.tokens
        self._is_resuming = self.has_failed = False
        self._num_skipped, self._position = 0, 0
        if isinstance(request, Score):
            self._num_skipped = len(self.tokens)
            return [replace(request, stream_id=stream_id)]
        if not keeps_key or not can_resume:
            self._key = token_urlsafe(12) if can_resume else None
        begun = replace(request, stream_id=stream_id, key=self._key)
        if not self.tokens:
            return [begun]
        if not self._can_continue():
            self._num_skipped = len(self.tokens)
            return [begun]
        rest = replace(begun, max_tokens=self.limit - len(self.tokens))
        if isinstance(request.prompt, str) or request.buffer is not None:
            return self._continue_text(rest)
        return [replace(rest, prompt=(*request.prompt, *self.tokens))]

    def _continue_text(self, rest: Generate) -> list[Request]:
        """Return messages that continue a text prompt or buffer with the received tokens, with the help of a new
        buffer."""
        name = f"context-{token_urlsafe(12)}"
        context = Buffer(
            stream_id=f"{rest.stream_id}-context", model=rest.model, name=name, prompt=rest.prompt, parent=rest.buffer
        )
        text = isinstance(rest.prompt, str) if rest.text is None else rest.text
        return [context, replace(rest, buffer=name, prompt=tuple(self.tokens), text=text or None)]

    def resume(self, stream_id: StreamId, *, can_resume: bool) -> list[Request]:
        """Return the messages that continue the stream on another connection. If the stream cannot be continued, fail
        it and return no messages."""
        if self._key is not None and can_resume and not self.has_failed:
            self._is_resuming = True
            return [Resume(stream_id=stream_id, key=self._key, position=self._position)]
        if self.can_begin_again:
            return self.begin(stream_id, can_resume=can_resume)
        self.fail(ConnectionLost("the connection was lost, and the stream cannot be continued"))
        return []

    @property
    def can_begin_again(self) -> bool:
        """Return whether the client can begin the stream again with a new request and get the same tokens."""
        request = self.request
        if isinstance(request, Score) or not (self.tokens or (self.has_branches and self._position)):
            return True
        return self._can_continue() or self._is_repeatable()

    def _can_continue(self) -> bool:
        request = self.request
        assert isinstance(request, Generate)
        if request.max_tokens is None:  # the server's limit is unknown, and so is the number of remaining tokens
            return False
        is_free = request.controller is None and not request.controllers and request.constraint is None
        # sampled placeholder tokens do not stand for images
        is_free = is_free and not (request.images or request.audio or request.video)
        return is_free and not self.has_branches and _MEMORYLESS.issuperset(request.options)

    def _is_repeatable(self) -> bool:
        request = self.request
        assert isinstance(request, Generate)
        # Without a temperature in the request, the server may use a recommended one. Repeated tokens may then differ,
        # so they are compared.
        return not self.has_branches and ((request.temperature or 0.0) <= 0 or "seed" in request.options)

    # -- answers ---------------------------------------------------------------------------------------------

    def accept(self, answer: Token | Failure | EventMessage) -> None:
        """Process an answer to the current attempt."""
        if self.is_over or self.has_failed:
            return
        if isinstance(answer, Failure):
            self._refuse(answer)
        elif not self._is_repeated(answer):
            self.num_failures, self._last_error = 0, None
            self._is_resuming = False
            if isinstance(answer, Token):
                self._add(answer)
            else:
                self._note(answer)
        self.wake()

    def _is_repeated(self, answer: Token | EventMessage) -> bool:
        """Return whether this answer was received before. If an earlier answer is missing, the attempt fails."""
        if answer.position is not None:
            if answer.position > self._position:
                self.fail_try(ProtocolError(f"answer {self._position} of a stream is missing"))
                return True
            if answer.position < self._position:
                return True
            self._position += 1
        if self._num_skipped and isinstance(answer, Token):
            known = self.tokens[len(self.tokens) - self._num_skipped]
            self._num_skipped -= 1
            if answer.token != known:
                self.fail(ProtocolError(f"the server began the stream again with token {answer.token}, not {known}"))
            return True
        return False

    def _note(self, event: EventMessage) -> None:
        branch = event.data.get("branch")
        if event.event == "fork" and isinstance(branch, int):
            self._branches.add(branch)
        self.ready.append(event)

    def _add(self, answer: Token) -> None:
        if answer.token is None and answer.finish_reason is None and not answer.text:
            self.fail_try(ProtocolError("the server sent a token without an id"))
            return
        if self.has_branches:
            self._end_branch(answer)
        else:
            self._add_only(answer)
        if isinstance(self.request, Generate) and answer.top_logprobs is not None:
            answer.top_logprobs = best(answer.top_logprobs, self.request.top_logprobs, answer.token)
        if answer.token is not None or answer.text or self.has_branches:
            self.ready.append(answer)

    def _end_branch(self, answer: Token) -> None:
        if answer.finish_reason is not None:
            self._branches.discard(answer.branch)
            if not self._branches:
                self.finish_reason = answer.finish_reason

    def _add_only(self, answer: Token) -> None:
        """Add a token of a stream without branches. The token's `position` becomes its index among the tokens."""
        if answer.token is not None:
            self.tokens.append(answer.token)
        if len(self.tokens) >= self.limit and answer.finish_reason is None:
            # The original server sends the finish reason in a second copy of the last token. It makes every stream as
            # long as the longest of its batch.
            answer.finish_reason = "stop" if isinstance(self.request, Score) else "length"
        self.finish_reason = answer.finish_reason
        answer.position = max(len(self.tokens) - 1, 0)
        if self.text_state is not None:
            text = "" if answer.token is None else self.text_state.push(answer.token)
            answer.text = text if self.finish_reason is None else text + self.text_state.flush()

    # -- failures --------------------------------------------------------------------------------------------

    def _refuse(self, failure: Failure) -> None:
        if self._is_resuming and failure.position is None:  # the server dropped the stream, or is another server
            self.fail_try(error_of(failure), pause=0.0)
        elif failure.retryable:
            self.fail_try(error_of(failure), pause=failure.retry_after)
        else:
            self.fail(error_of(failure))

    def fail_try(self, error: BridleError, pause: float | None = None) -> None:
        """End this attempt with an error. Another attempt follows, unless the tokens received so far cannot be
        repeated."""
        if not self.can_begin_again:
            self.fail(error)
            return
        self.num_failures += 1
        self.retry_after, self._last_error = pause, error
        self.has_failed = True
        self.wake()

    def give_up(self) -> None:
        """End the stream after too many failures."""
        self.fail(self._last_error or ConnectionLost(f"the connection was lost {self.num_failures} times in a row"))

    def fail(self, error: BridleError) -> None:
        """End the stream with an error."""
        self.error = error
        self.wake()


def best(alternatives: Mapping[int, float], limit: int, chosen: int | None) -> Mapping[int, float]:
    """Return the `limit` most probable tokens and the chosen token. The original server also sends tokens that other
    streams of its batch requested."""
    if len(alternatives) <= limit:
        return alternatives
    keep = {*sorted(alternatives, key=alternatives.__getitem__, reverse=True)[:limit], chosen}
    return {token: number for token, number in alternatives.items() if token in keep}
