"""The interactive client: reads lines, shows text or tokens as they arrive, and can run several prompts at the same
time.

The module uses neither a terminal nor a keyboard: lines come from an iterator, and a `Screen` shows the results.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Protocol

from bridle.errors import BridleError, InvalidRequest
from bridle.lmtp.client import Client, TokenStream
from bridle.lmtp.command_line import QUIT, Line, parse_line
from bridle.lmtp.messages import EventMessage, Token


class Screen(Protocol):
    """Interface that shows answers. `number` identifies the prompt of an answer."""

    def begin(self, number: int, prompt: str) -> None:
        """Show that a prompt was sent."""

    def text(self, number: int, text: str) -> None:
        """Show a piece of the answer."""

    def token(self, number: int, token: dict[str, Any]) -> None:
        """Show one token object."""

    def end(self, number: int) -> None:
        """Show that the answer is complete."""

    def note(self, text: str) -> None:
        """Show any other notice."""

    def ask(self) -> None:
        """Show that the user may type a line."""


class Interactive:
    """One session of the interactive client. If `shows_tokens`, token objects are shown as they arrive, and the whole
    text at the end."""

    def __init__(self, client: Client, screen: Screen, *, shows_tokens: bool = False) -> None:
        self._client = client
        self._screen = screen
        self._shows_tokens = shows_tokens
        self._running: dict[int, asyncio.Task[None]] = {}
        self._num_prompts = 0
        client.on_event = self._tell

    @property
    def is_answering(self) -> bool:
        """Return whether the answer to any prompt is incomplete."""
        return bool(self._running)

    async def run(self, lines: AsyncIterator[str], *, leaves_at_once: bool) -> None:
        """Process lines until `quit` or the end of `lines`. If `leaves_at_once`, `quit` cancels the running answers."""
        self._screen.ask()
        async for line in lines:
            if line.strip() in QUIT:
                if leaves_at_once:
                    self.stop()
                break
            self._take(line)
        while self._running:
            await asyncio.wait(self._running.values())

    def stop(self) -> None:
        """Cancel all running answers."""
        for task in self._running.values():
            task.cancel()

    def _take(self, text: str) -> None:
        try:
            line = parse_line(text)
            _check(line)
        except BridleError as error:
            self._screen.note(str(error))
            self._screen.ask()
            return
        if not line.prompt:
            self._screen.ask()
            return
        self._num_prompts += 1
        number = self._num_prompts
        task = asyncio.get_running_loop().create_task(self._answer(number, line))
        self._running[number] = task
        task.add_done_callback(lambda _: self._done(number))

    def _done(self, number: int) -> None:
        self._screen.end(number)
        del self._running[number]
        if not self._running:
            self._screen.ask()

    async def _answer(self, number: int, line: Line) -> None:
        shown = line.prompt if isinstance(line.prompt, str) else ""
        try:
            stream = await self._client.generate(line.prompt, **{"text": True, **line.options})
            async with stream:
                await self._show(number, shown, stream)
        except BridleError as error:
            self._screen.note(f"[{number}] {error}")

    async def _show(self, number: int, prompt: str, stream: TokenStream) -> None:
        if not self._shows_tokens:
            self._screen.begin(number, prompt)
        texts: list[str] = []
        async for token in stream:
            if self._shows_tokens:
                self._screen.token(number, _object(token))
                texts.append(token.text or "")
            else:
                self._screen.text(number, f" {token.token}" if token.text is None else token.text)
        if self._shows_tokens and any(texts):
            self._screen.begin(number, prompt)
            self._screen.text(number, "".join(texts))

    def _tell(self, event: EventMessage) -> None:
        about = ", ".join(f"{name} {value}" for name, value in event.data.items())
        self._screen.note(f"[the server: {event.event}{': ' if about else ''}{about}]")


def _object(token: Token) -> dict[str, Any]:
    """Return a token as the JSON object of the protocol."""
    known: dict[str, Any] = {"token": token.token, "stream_id": token.stream_id, "logprob": token.logprob}
    known["finish_reason"] = token.finish_reason
    known["top_logprobs"] = {str(key): value for key, value in (token.top_logprobs or {}).items()}
    return known if token.text is None else {**known, "text": token.text}


def _check(line: Line) -> None:
    """Raise `InvalidRequest` for literals that JSON cannot express."""
    for name, value in line.options.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise InvalidRequest(f"{name}= cannot be sent: {value!r} cannot be written as JSON", name) from None
