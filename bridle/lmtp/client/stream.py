"""The stream of tokens that a caller of the client reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Self

from bridle.errors import RequestCancelled
from bridle.lmtp.client.stream_state import Item, StreamProgress
from bridle.lmtp.messages import EventMessage, Token

if TYPE_CHECKING:
    from bridle.lmtp.client.connection import ClientConnection


class TokenStream:
    """Iterator over the tokens of a stream, each once and in order, for one reader. If an error ended the stream, the
    iteration raises this error at its end.

    An unfinished stream is cancelled when its `async with` block ends, or when the last reference to it is dropped. The
    `position` of a token is its index in the stream, unless the request had `rewind="event"`.
    """

    def __init__(
        self, connection: ClientConnection, progress: StreamProgress, on_event: Callable[[EventMessage], None]
    ) -> None:
        self._connection = connection
        self._progress = progress
        self._on_event = on_event
        self.changed = asyncio.Event()
        self._has_begun = False

    @property
    def finish_reason(self) -> str | None:
        """Return the reason why the stream ended; None before its end."""
        return self._progress.finish_reason

    @property
    def num_unread(self) -> int:
        """Return the number of received tokens and events that were not read yet."""
        return len(self._progress.ready)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        while True:
            for item in await self.take(1):
                if isinstance(item, Token):
                    return item
                self._on_event(item)

    async def items(self) -> AsyncIterator[Item]:
        """Yield tokens and, if requested, the events between them: rewinds, forks and logs."""
        try:
            while True:
                for item in await self.take():
                    yield item
        except StopAsyncIteration:
            return

    async def take(self, limit: int | None = None) -> list[Item]:
        """Wait for tokens or events, and return all that are available, at most `limit`. Raises `StopAsyncIteration` at
        the end."""
        progress, patience = self._progress, self._connection.patience
        while not progress.ready:
            if progress.error is not None:
                raise progress.error
            if progress.is_over:
                raise StopAsyncIteration
            self.changed.clear()
            await self._connection.wait_for(
                self, progress, patience.between_tokens if self._has_begun else patience.first_token
            )
        self._has_begun = True
        count = len(progress.ready) if limit is None else min(limit, len(progress.ready))
        taken = [progress.ready.popleft() for _ in range(count)]
        self._connection.note_taken()
        return taken

    async def read(self) -> list[Token]:
        """Wait for the end of the stream. Returns all tokens that were not read before."""
        return [token async for token in self]

    async def text(self) -> str:
        """Wait for the end of the stream. Returns the text of all tokens that were not read before."""
        return "".join([token.text or "" async for token in self])

    async def cancel(self) -> None:
        """End the stream, also on the server if it supports cancelling. Received tokens can still be read."""
        await self._connection.cancel(self._progress, RequestCancelled("the stream was cancelled by this client"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if not self._progress.is_over:
            await self.cancel()
