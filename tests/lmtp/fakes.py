"""Servers for tests of clients: one behaves like LMQL's server, others break connections as the test decides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bridle.errors import ConnectionLost
from bridle.lmtp.client import ClientChannel, MemoryCarrier, Transport

VOCAB_SIZE = 97
EOS = 0


def next_token(context: Sequence[int]) -> int:
    """Return the greedy next token of a model, which depends on all previous tokens."""
    state = 7
    for token in context:
        state = (state * 31 + token + 1) % 1_000_003
    return 1 + state % (VOCAB_SIZE - 1)


def continuation(prompt: Sequence[int], length: int) -> list[int]:
    context = list(prompt)
    for _ in range(length):
        context.append(next_token(context))
    return context[len(prompt) :]


@dataclass
class GenuineLike:
    """A server with the deviations of LMQL's server: it sends the last token twice, writes floats that are not JSON,
    refuses unknown fields, and closes the connection on garbage. It sends `leak` more tokens than requested, as if
    another request of the batch needed them. `edit` may change or add frames."""

    leak: int = 0
    edit: Callable[[str], Iterable[str]] = lambda frame: (frame,)
    received: list[str] = field(default_factory=list)

    @property
    def carrier(self) -> MemoryCarrier:
        return MemoryCarrier(self.serve)

    async def serve(self, link: ClientChannel) -> None:
        while True:
            line = await link.receive()
            self.received.append(line)
            for answer in self.answers(line):
                for frame in self.edit(answer):
                    await link.send(frame)

    def answers(self, line: str) -> Iterable[str]:
        kind, _, text = line.partition(" ")
        body = json.loads(text)
        stream_id = body.pop("stream_id")
        if kind == "MODEL_INFO":
            yield f'MSG [{{"stream_id": {stream_id}, "model_info": {{"model": "m", "model_type": "transformers"}}}}]'
        elif kind == "SCORE":
            for number, token in enumerate(body["scored"], 1):
                reason = "stop" if number == len(body["scored"]) else None
                yield _token(stream_id, token, reason, top=False)
        elif kind == "GENERATE":
            yield from self._generate(stream_id, body)
        else:
            yield f'MSG [{{"stream_id": {stream_id}, "error": "Unknown command: {kind}"}}]'

    def _generate(self, stream_id: Any, body: dict[str, Any]) -> Iterable[str]:
        unknown = body.keys() - {"model", "prompt", "max_tokens", "temperature", "top_logprobs", "logit_bias", "top_p"}
        if unknown:
            error = f"failed to generate tokens 'not used by the model: {sorted(unknown)}'"
            yield "TOKEN " + json.dumps([{"stream_id": stream_id, "error": error}])
            return
        tokens = continuation(body["prompt"], body.get("max_tokens", 32) + self.leak)
        for token in tokens:
            yield _token(stream_id, token, None)
        yield _token(stream_id, tokens[-1], "length")


def _token(stream_id: Any, token: int, reason: str | None, top: bool = True) -> str:
    body: dict[str, Any] = {"token": token, "stream_id": stream_id, "logprob": -1.5, "finish_reason": reason}
    if top:
        body["top_logprobs"] = {str(token): -1.5, "96": float("-inf")}
    return "TOKEN " + json.dumps([body])


class CutCarrier:
    """A transport that breaks each connection after a number of bytes. `cuts` has (to the client, to the server) for
    each connection in order; later connections stay open. Messages that the break cuts off never arrive."""

    name = "a carrier that breaks"

    def __init__(self, inner: Transport, cuts: Sequence[tuple[int, int]]) -> None:
        self._inner = inner
        self._cuts = list(cuts)
        self.num_connections = 0

    async def connect(self) -> ClientChannel:
        self.num_connections += 1
        link = await self._inner.connect()
        if not self._cuts:
            return link
        down, up = self._cuts.pop(0)
        return CutLink(link, down, up)


class CutLink:
    def __init__(self, link: ClientChannel, down: int, up: int) -> None:
        self._link = link
        self._down = down
        self._up = up
        self._is_cut = asyncio.Event()

    async def send(self, message: str) -> None:
        self._up -= len(message.encode())
        await self._check(self._up)
        await self._link.send(message)

    async def receive(self) -> str:
        receiving = asyncio.ensure_future(self._link.receive())
        cut = asyncio.ensure_future(self._is_cut.wait())
        try:
            await asyncio.wait({receiving, cut}, return_when=asyncio.FIRST_COMPLETED)
            if self._is_cut.is_set():
                raise ConnectionLost("cut")
        finally:
            cut.cancel()
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
        message = receiving.result()
        self._down -= len(message.encode())
        await self._check(self._down)
        return message

    async def _check(self, left: int) -> None:
        if left < 0 or self._is_cut.is_set():
            await self.close()
            raise ConnectionLost("cut")

    async def close(self) -> None:
        self._is_cut.set()
        await self._link.close()
