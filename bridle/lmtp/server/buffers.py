"""Buffers of one connection: named token prefixes, so that a client need not send a prefix again.

A name is valid as soon as the server has read the message that defines it. Requests with the name wait until the
buffer's tokens are known. If a running stream will fill the buffer, such requests wait until that stream has ended. A
buffer has only tokens; the engine's prefix cache finds their KV.
"""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field

from bridle.errors import BridleError, InvalidRequest


class PrefixBuffer:
    """One buffer, which has its tokens or waits for them."""

    def __init__(self, home: Buffers, name: str, model: str) -> None:
        self.name = name
        self.model = model
        self.num_tokens = 0
        self._home = home
        self._tokens: asyncio.Future[array[int]] = asyncio.get_running_loop().create_future()
        self._tokens.add_done_callback(_look)

    async def tokens(self) -> tuple[int, ...]:
        """Wait for the buffer's tokens, and return them. Raises the error if the buffer failed."""
        return tuple(await asyncio.shield(self._tokens))

    def fill(self, tokens: tuple[int, ...]) -> None:
        """Set the buffer's tokens. If the connection's buffers then have too many tokens, the buffer fails."""
        if self._tokens.done():
            return
        try:
            self._home.claim(self, len(tokens))
        except InvalidRequest as error:
            self.fail(error)
        else:
            self._tokens.set_result(array("I", tokens))

    def fail(self, error: BridleError) -> None:
        """Fail the buffer, unless it already has its tokens."""
        if not self._tokens.done():
            self._tokens.set_exception(error)
            self._home.release(self)


@dataclass(slots=True)
class Buffers:
    """The buffers of a connection: at most `max_buffers` names, with at most `max_tokens` tokens in total."""

    max_buffers: int
    max_tokens: int
    _named: dict[str, PrefixBuffer] = field(default_factory=dict)
    _num_tokens: int = 0

    def reserve(self, name: str, model: str) -> PrefixBuffer:
        """Reserve a name for a buffer that will get its tokens later. An older buffer with that name loses the name,
        but earlier requests still use it. Raises `InvalidRequest` if there are too many buffers."""
        if name not in self._named and len(self._named) >= self.max_buffers:
            raise InvalidRequest(
                f"the connection has {self.max_buffers} buffers, which is the limit: drop one of them", "name"
            )
        self.drop(name)
        buffer = self._named[name] = PrefixBuffer(self, name, model)
        return buffer

    def find(self, name: str | None, model: str, param: str = "buffer") -> PrefixBuffer | None:
        """Return the buffer with this name; None if `name` is None. Raises `InvalidRequest` for an unknown name."""
        if name is None:
            return None
        buffer = self._named.get(name)
        if buffer is None:
            raise InvalidRequest(f"there is no buffer {name!r} on this connection", param)
        if buffer.model != model:
            raise InvalidRequest(f"buffer {name!r} belongs to model {buffer.model!r}, not {model[:100]!r}", param)
        return buffer

    def drop(self, name: str) -> None:
        """Delete the name of a buffer. Unknown names are ignored."""
        buffer = self._named.get(name)
        if buffer is not None:
            self.release(buffer)

    def claim(self, buffer: PrefixBuffer, num_tokens: int) -> None:
        """Count the tokens of a buffer, if it still has its name. Raises `InvalidRequest` if all buffers together have
        too many tokens."""
        if self._named.get(buffer.name) is not buffer:
            return
        if self._num_tokens + num_tokens > self.max_tokens:
            raise InvalidRequest(
                f"buffer {buffer.name!r} of {num_tokens} tokens does not fit: the connection's buffers have "
                f"{self._num_tokens} tokens, and at most {self.max_tokens}",
                "prompt",
            )
        buffer.num_tokens = num_tokens
        self._num_tokens += num_tokens

    def release(self, buffer: PrefixBuffer) -> None:
        """Free the buffer's name, and subtract its tokens from the total."""
        if self._named.get(buffer.name) is buffer:
            del self._named[buffer.name]
            self._num_tokens -= buffer.num_tokens


def _look(tokens: asyncio.Future[array[int]]) -> None:
    """Retrieve a failed buffer's error, so that asyncio does not warn if no request waits for the buffer."""
    if not tokens.cancelled():
        tokens.exception()
