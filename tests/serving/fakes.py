"""A byte-level model with a scripted engine, for tests of front-ends."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.request import Request
from bridle.errors import InvalidRequest
from bridle.outputs import Event, Finished, FinishReason, Forked, Logprob, PromptEvent, TokenEvent, Usage
from bridle.serving import Admission, LoadedModel, ModelRegistry
from bridle.serving.lifecycle.request_lifecycle import AppState, RequestLifecycle
from bridle.serving.lifecycle.request_record import RequestRecord
from bridle.serving.tenancy.keys import Identity
from bridle.serving.tenancy.per_user_store import PerUserStore
from bridle.tokenizer.chat_settings import ChatSettings

EOS = 256
VOCAB_SIZE = 260


class LineTemplate:
    """A chat template that renders messages as `role: content` lines."""

    is_present = True
    text = "{{ role }}: {{ content }}"

    def render(self, messages: Sequence[dict[str, Any]], tools: Any = None, *options: Any, **more: Any) -> str:
        lines = [f"{message['role']}: {message.get('content') or ''}\n" for message in messages]
        return "".join(f"[{tool['function']['name']}]" for tool in tools or ()) + "".join(lines) + "assistant: "


class ByteTokenizer:
    """Token i is byte i; 256 ends a text. Chats are rendered as `role: content` lines."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = (EOS,)
    bos_token_id: int | None = None
    special_token_ids = frozenset({EOS})
    chat_template = LineTemplate()
    template_text = ""
    chat_settings = ChatSettings()
    added_tokens: tuple[str, ...] = ()

    def id_of(self, token: str) -> int | None:
        return None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Iterable[int], skip_special_tokens: bool = True) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace") if token < 256 else f"<{token}>"

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        return self.encode(self.chat_template.render(messages))


@dataclass(frozen=True)
class Statistics:
    """A fake of the engine's statistics."""

    num_running: int = 0
    num_waiting: int = 0
    tenant_blocks: Counter[str] = field(default_factory=Counter)


Script = Callable[[Request], Iterable[list[Event]]]


class FakeStream:
    """A stream of scripted lists of events. An endless request then waits until it is cancelled."""

    def __init__(self, batches: Iterable[list[Event]], is_endless: bool, said_all: asyncio.Event) -> None:
        self._said_all = said_all
        self._batches = iter(batches)
        self._is_endless = is_endless
        self.is_cancelled = False
        self.is_over = False
        self.prompt: PromptEvent | None = None
        self._cancelled = asyncio.Event()
        self.gone = threading.Event()  # the same, for a test to wait on

    def cancel(self) -> None:
        if not self.is_over:
            self.is_cancelled = True
            self.gone.set()
        self._cancelled.set()

    async def __aenter__(self) -> FakeStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.cancel()

    def __aiter__(self) -> AsyncIterator[list[Event]]:
        return self

    async def __anext__(self) -> list[Event]:
        await asyncio.sleep(0)
        for batch in self._batches:
            self.prompt = next((event for event in batch if isinstance(event, PromptEvent)), self.prompt)
            return batch
        self._said_all.set()
        if self._is_endless:
            await self._cancelled.wait()
        self.is_over = True
        raise StopAsyncIteration

    def __iter__(self) -> Iterator[list[Event]]:
        self.is_over = True
        return self._batches


class FakeClient:
    """A fake engine that answers every request with a script."""

    def __init__(
        self, script: Script, max_model_len: int = 256, num_blocks: int = 64, is_endless: bool = False
    ) -> None:
        self.info = ExecutorInfo("fake", VOCAB_SIZE, max_model_len, num_blocks, 16, eos_token_ids=(EOS,))
        self.script = script
        self.is_endless = is_endless
        self.is_healthy = True
        self.requests: list[Request] = []
        self.unparked: list[str] = []
        self.streams: list[FakeStream] = []
        self.submitted = threading.Event()
        self.said_all = asyncio.Event()  # some stream has no scripted events left
        self.refusal: Exception | None = None
        self.closed_with: float | None = None

    def submit(self, request: Request) -> FakeStream:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        self.streams.append(FakeStream(self.script(request), self.is_endless, self.said_all))
        self.submitted.set()
        return self.streams[-1]

    def cancel(self, request_id: str) -> None:
        for request, stream in zip(self.requests, self.streams, strict=True):
            if request.id == request_id:
                stream.cancel()

    def release_retained_kv(self, request_id: str) -> None:
        self.unparked.append(request_id)

    def statistics(self) -> Statistics:
        return Statistics(num_running=sum(not stream.is_over for stream in self.streams))

    def start(self) -> None:
        raise InvalidRequest("a fake is always started")

    def close(self, drain: float = 0.0) -> None:
        self.closed_with = drain


def say(text: str) -> Script:
    """Return a script in which every output is `text`, byte by byte, cut at `max_tokens`. Each token has one batch of
    events."""

    def script(request: Request) -> Iterator[list[Event]]:
        sampling, rid = request.sampling, request.id
        tokens = list(text.encode())[: sampling.max_tokens]
        reason = FinishReason.STOP if len(tokens) == len(text.encode()) else FinishReason.LENGTH
        yield [prompt_event(request), *(Forked(rid, index) for index in range(1, sampling.n))]
        for token in tokens:
            entry = logprob(token, sampling.logprobs)
            yield [TokenEvent(rid, index, token, chr(token), entry) for index in range(sampling.n)]
        usage = Usage(len(request.prompt), 0, len(tokens), len(tokens))
        yield [Finished(rid, index, reason, usage) for index in range(sampling.n)]

    return script


def prompt_event(request: Request) -> PromptEvent:
    wanted = request.sampling.prompt_logprobs
    entries = [logprob(token, wanted) for token in request.prompt] if wanted is not None else []
    return PromptEvent(request.id, 0, request.prompt, 0, (None, *entries[1:]) if entries else ())


def logprob(token: int, num_top: int | None) -> Logprob | None:
    """Return log-probability -0.5 for the token, and -1, -2, ... for its neighbors."""
    if num_top is None:
        return None
    top = [(token, -0.5)] + [((token + i) % 256, -float(i)) for i in range(1, num_top)]
    return Logprob(token, -0.5, tuple(top[:num_top]), 1)


def fake_model(script: Script | None = None, name: str = "fake", **options: Any) -> LoadedModel:
    """Return a loaded model whose `client` is a `FakeClient`."""
    client: Any = FakeClient(script or say("hello"), **options)
    tokenizer: Any = ByteTokenizer()
    return LoadedModel(name, client, tokenizer, created=1_700_000_000, shutdown=client.close)


async def served_by(model: LoadedModel, identity: Identity | None = None) -> RequestLifecycle:
    """Return the lifecycle of a request that holds the model and a request slot."""
    host = AppState(ModelRegistry([model]), Admission())
    serving = RequestLifecycle(host, RequestRecord(id="c", identity=identity), ExitStack())
    await serving.acquire_model(None)
    return serving


def check_counts(book: PerUserStore[Any]) -> None:
    """Check that the store's counts match its entries, and are within the limits."""
    entries, bounds = book.entries, book.bounds
    assert book.num_bytes == sum(entry.num_bytes for entry in entries.values()) <= bounds.max_bytes
    assert {name for share in book.shares.values() for name in share.names} == entries.keys()
    assert len(entries) <= bounds.max_entries
    for share in book.shares.values():
        assert share.num_bytes == sum(entries[name].num_bytes for name in share.names) <= bounds.max_bytes_of_user
        assert 0 < len(share.names) <= bounds.max_of_user
