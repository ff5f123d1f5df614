"""The client for programs without an event loop. Each call runs on an event loop in a separate thread.

with SyncClient("localhost:8080", "demo") as client:
    for token in client.generate("Once upon a time", max_tokens=40):
        print(token.text, end="")
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

from bridle.lmtp.client.client import Client
from bridle.lmtp.client.stream import TokenStream
from bridle.lmtp.client.stream_state import Item
from bridle.lmtp.messages import Token

T = TypeVar("T")


class Portal:
    """An event loop that runs in a separate thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bridle-lmtp", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return not self._loop.is_closed()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and return its result. If the wait is interrupted, `work` is cancelled."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        if self.is_open:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class SyncClient:
    """A client like `Client`, with the same arguments and methods, for ordinary threads. Several threads may share a
    client."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._portal = Portal()
        try:
            self._client = self._portal.call(_made(Client, *args, **kwargs))
        except BaseException:
            self._portal.close()
            raise

    def generate(self, prompt: str | Sequence[int], **options: Any) -> SyncStream:
        """See `Client.generate`."""
        return SyncStream(self._portal, self._portal.call(self._client.generate(prompt, **options)))

    def score(self, prompt: str | Sequence[int], scored: str | Sequence[int], **options: Any) -> list[Token]:
        """See `Client.score`."""
        return self._portal.call(self._client.score(prompt, scored, **options))

    def model_info(self, model: str | None = None) -> Any:
        """See `Client.model_info`."""
        return self._portal.call(self._client.model_info(model))

    def buffer(self, name: str, prompt: str | Sequence[int] = (), **options: Any) -> int:
        """See `Client.buffer`."""
        return self._portal.call(self._client.buffer(name, prompt, **options))

    def drop_buffer(self, name: str) -> None:
        """See `Client.drop_buffer`."""
        self._portal.call(self._client.drop_buffer(name))

    def answer(self, call_id: str, result: Any = None, *, error: str | None = None) -> None:
        """See `Client.answer`."""
        self._portal.call(self._client.answer(call_id, result, error=error))

    def connect(self) -> Mapping[str, Any]:
        """See `Client.connect`."""
        return self._portal.call(self._client.connect())

    def close(self) -> None:
        """Close the connection and end the thread. Idempotent."""
        if self._portal.is_open:
            self._portal.call(self._client.close())
            self._portal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class SyncStream:
    """A stream like `TokenStream`, for ordinary threads. Each call to the event loop fetches all available tokens."""

    def __init__(self, portal: Portal, stream: TokenStream) -> None:
        self._portal = portal
        self._stream = stream
        self._taken: list[Item] = []

    @property
    def finish_reason(self) -> str | None:
        """Return the reason why the stream ended; None before its end."""
        return self._stream.finish_reason

    def __iter__(self) -> Iterator[Token]:
        return (item for item in self.items() if isinstance(item, Token))

    def items(self) -> Iterator[Item]:
        """See `TokenStream.items`."""
        while True:
            while self._taken:
                yield self._taken.pop(0)
            try:
                self._taken = self._portal.call(self._stream.take())
            except StopAsyncIteration:
                return

    def read(self) -> list[Token]:
        """See `TokenStream.read`."""
        return list(self)

    def text(self) -> str:
        """See `TokenStream.text`."""
        return "".join(token.text or "" for token in self)

    def cancel(self) -> None:
        """See `TokenStream.cancel`."""
        self._portal.call(self._stream.cancel())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._stream.finish_reason is None:
            self.cancel()


async def _made(make: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    return make(*args, **kwargs)
