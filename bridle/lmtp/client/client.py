"""A client for LMTP servers, bridle's and LMQL's original: many streams over one connection, which reconnects by
itself.

    async with Client("localhost:8080", "demo") as client:
        async for token in await client.generate("Once upon a time", max_tokens=40):
            print(token.text, end="")

This module has the methods that begin requests. `ClientProtocol` and `StreamProgress` choose the messages to send and
interpret the answers. `ClientConnection` sends and receives messages.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.lmtp import messages as m
from bridle.lmtp.client.connection import ClientConnection
from bridle.lmtp.client.protocol import ClientProtocol
from bridle.lmtp.client.retry import RetryPolicy
from bridle.lmtp.client.stream import TokenStream
from bridle.lmtp.client.stream_state import StreamProgress
from bridle.lmtp.client.transports import Transport
from bridle.lmtp.client.websocket import DEFAULT_ENDPOINT, WebSocketCarrier

if TYPE_CHECKING:
    from bridle.tokenizer import Tokenizer

_DEFAULT_PATIENCE = RetryPolicy()


class Client:
    """An LMTP client for the tasks of one event loop. The client connects on first use, and reconnects after the
    connection is lost.

    `server` is an address or a transport, and `model` the default model of requests. At most `max_streams` streams are
    open at once, and further streams wait. When `max_unread` tokens wait for readers and no reader waits for a token,
    the connection is not read, so that the server slows down. With a `tokenizer`, the client accepts and returns text
    even if the server knows only tokens. If `plain` is true, only messages of the original protocol are sent.
    `on_event` is called with the server's notices about delays, and must return at once.
    """

    def __init__(
        self,
        server: str | Transport = DEFAULT_ENDPOINT,
        model: str = "auto",
        *,
        patience: RetryPolicy = _DEFAULT_PATIENCE,
        max_streams: int = 256,
        max_unread: int = 65_536,
        tokenizer: Tokenizer | None = None,
        plain: bool = False,
        on_event: Callable[[m.EventMessage], None] = lambda event: None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.on_event = on_event
        carrier = WebSocketCarrier(server) if isinstance(server, str) else server
        exchange = ClientProtocol(model, is_plain=plain, on_event=self._tell)
        self._connection = ClientConnection(carrier, exchange, patience, max_unread)
        self._places = asyncio.Semaphore(max_streams)
        self._placed: set[StreamProgress] = set()

    # -- requests --------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 32,
        temperature: float | None = None,
        top_logprobs: int = 1,
        logit_bias: Mapping[int, float] | None = None,
        model: str | None = None,
        text: bool | None = None,
        buffer: str | None = None,
        save: str | None = None,
        controller: str | None = None,
        controller_arg: Any = None,
        controllers: Sequence[Any] = (),
        client_tools: Sequence[str] = (),
        constraint: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        rewind: str = "hold",
        images: Sequence[str] = (),
        audio: Sequence[str] = (),
        video: Sequence[str] = (),
        trace: bool | str | None = None,
        priority: int | None = None,
        deadline: float | None = None,
        **options: Any,
    ) -> TokenStream:
        """Begin a stream, and return it as soon as the request is sent. Waits while `max_streams` streams are open.
        `options` are further sampling parameters, under the server's names. `images`, `audio` and `video` are `data:`
        URLs for the prompt's placeholders, in order. `trace` asks the server to store a trace; if it is `"events"`, the
        stream's items include the trace records."""
        _check_numbers(max_tokens, top_logprobs, temperature)
        request = m.Generate(
            stream_id=0,
            model=model or self.model,
            prompt=prompt if isinstance(prompt, str) else tuple(prompt),
            max_tokens=max_tokens,
            temperature=temperature,
            top_logprobs=top_logprobs,
            logit_bias=logit_bias or {},
            options={name: value for name, value in options.items() if value is not None},
            text=text,
            buffer=buffer,
            save=save,
            controller=controller,
            controller_arg=controller_arg,
            controllers=tuple(controllers),
            client_tools=tuple(client_tools),
            constraint=constraint,
            adapter=adapter,
            rewind=rewind,
            images=tuple(images),
            audio=tuple(audio),
            video=tuple(video),
            trace=trace,
            priority=priority,
            deadline=deadline,
        )
        for extension in _extensions(request):
            await self._needs(extension)
        return await self._stream(await self._as_understood(request))

    async def score(
        self,
        prompt: str | Sequence[int],
        scored: str | Sequence[int],
        *,
        model: str | None = None,
        buffer: str | None = None,
        adapter: str | None = None,
    ) -> list[m.Token]:
        """Return the log-probability of each token of `scored`, given `prompt` and the earlier tokens of `scored`."""
        if not scored:
            raise InvalidRequest("scored is empty; it must have at least one token", "scored")
        request = m.Score(
            stream_id=0,
            model=model or self.model,
            prompt=await self._as_prompt(prompt),
            scored=await self._as_prompt(scored, is_start=False),
            buffer=buffer,
            adapter=adapter,
        )
        return await (await self._stream(StreamProgress(request))).read()

    async def model_info(self, model: str | None = None) -> Any:
        """Return the server's description of a model. While the model is loading, ask again for up to
        `patience.first_token` seconds. If the model is still not loaded, return the server's answer "<unavailable>"."""
        request = m.ModelInfo(stream_id=0, model=model or self.model)
        info: Any = m.UNAVAILABLE
        num_asked = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._connection.patience.first_token):
                while True:
                    info = (await self._connection.ask(request)).model_info
                    if info != m.UNAVAILABLE:
                        return info
                    num_asked += 1
                    await asyncio.sleep(self._connection.patience.pause(num_asked))
        return info

    async def buffer(
        self, name: str, prompt: str | Sequence[int] = (), *, parent: str | None = None, length: int | None = None
    ) -> int:
        """Store a prompt prefix on the server under a name, so that `generate(..., buffer=name)` continues from it.
        Returns the number of the prefix's tokens. After a reconnect, the client sends its buffers again. Buffers that a
        stream saved with `save` are lost."""
        await self._needs("buffers")
        given = prompt if isinstance(prompt, str) else tuple(prompt)
        request = m.Buffer(stream_id=0, model=self.model, name=name, prompt=given, parent=parent, length=length)
        return (await self._connection.ask(request)).num_tokens or 0

    async def drop_buffer(self, name: str) -> None:
        """Delete a named prefix on the server."""
        await self._needs("buffers")
        await self._connection.ask(m.Buffer(stream_id=0, model=self.model, name=name, drop=True))

    async def answer(self, call_id: str, result: Any = None, *, error: str | None = None) -> None:
        """Answer a tool call that an event `tool_call` reported, with a result or an error message. The stream that
        waits for the answer continues. Raises an error if no call with this id waits."""
        await self._needs("tool_results")
        await self._connection.ask(m.ToolResult(stream_id=0, id=call_id, result=result, error=error))

    # -- the connection --------------------------------------------------------------------------------------

    async def connect(self) -> Mapping[str, Any]:
        """Connect if there is no connection. Returns the extensions that the server has announced. Raises
        `ConnectionLost` if the server cannot be reached."""
        return await self._connection.connect()

    async def close(self) -> None:
        """Close the connection and end all streams. Idempotent."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # -- beginning streams -----------------------------------------------------------------------------------

    async def _stream(self, progress: StreamProgress) -> TokenStream:
        await self._places.acquire()
        self._placed.add(progress)
        stream = TokenStream(self._connection, progress, self._tell)
        changed = stream.changed  # without a reference to the stream, because dropping the last one cancels it

        def wake() -> None:
            changed.set()
            if progress.is_over:
                self._leave_place(progress)

        progress.wake = wake
        await self._connection.open(stream, progress)
        return stream

    def _tell(self, event: m.EventMessage) -> None:
        self.on_event(event)

    def _leave_place(self, progress: StreamProgress) -> None:
        if progress in self._placed:
            self._placed.discard(progress)
            self._places.release()

    async def _as_understood(self, request: m.Generate) -> StreamProgress:
        """Return the request with text, or with tokens if the server knows only tokens."""
        if not isinstance(request.prompt, str) and not request.text:
            return StreamProgress(request)
        if (await self.connect()).get("text"):
            return StreamProgress(request)
        prompt = request.prompt if isinstance(request.prompt, tuple) else self._encode(request.prompt)
        progress = StreamProgress(replace(request, prompt=prompt, text=None))
        if self.tokenizer is not None and request.text is not False:
            from bridle.tokenizer import Detokenizer

            progress.text_state = Detokenizer(self.tokenizer).open(prompt, skip_special_tokens=True)
        return progress

    async def _as_prompt(self, prompt: str | Sequence[int], *, is_start: bool = True) -> m.Prompt:
        if not isinstance(prompt, str):
            return tuple(prompt)
        return prompt if (await self.connect()).get("text") else self._encode(prompt, is_start=is_start)

    def _encode(self, text: str, *, is_start: bool = True) -> tuple[int, ...]:
        if self.tokenizer is None:
            raise UnsupportedFeature(
                f"the server {self._connection.carrier.name} accepts only tokens: give the client a tokenizer, or "
                "send tokens",
                "prompt",
            )
        return tuple(self.tokenizer.encode(text, add_special_tokens=is_start))

    async def _needs(self, feature: str) -> None:
        if not (await self.connect()).get(feature):
            raise UnsupportedFeature(f"{self._connection.carrier.name} has no {feature}")


def _check_numbers(max_tokens: Any, top_logprobs: Any, temperature: Any) -> None:
    """Raise `InvalidRequest` for numbers that are invalid on every server."""
    for name, value in (("max_tokens", max_tokens), ("top_logprobs", top_logprobs)):
        if not isinstance(value, int) or value < 1:
            raise InvalidRequest(f"{name} is {value!r}; must be an integer of at least 1", name)
    if temperature is not None and not isinstance(temperature, (int, float)):
        raise InvalidRequest(f"temperature is {temperature!r}; must be a number", "temperature")


def _extensions(request: m.Generate) -> list[str]:
    """Return the protocol extensions that the request needs. A server without these extensions would ignore parts of
    the request."""
    fields = {"images": request.images, "audio": request.audio, "video": request.video, "traces": request.trace}
    return [extension for extension, asked in fields.items() if asked]
