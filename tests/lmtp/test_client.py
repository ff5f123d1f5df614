"""Tests of the client with servers that deviate, fail, are slow, or send wrong data. The tests wait only for events."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bridle.errors import (
    ConnectionLost,
    ContextOverflow,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    ProtocolError,
    RemoteError,
    RequestCancelled,
    UnsupportedFeature,
)
from bridle.lmtp import Client, RetryPolicy, SyncClient
from bridle.lmtp.client import ClientChannel, MemoryCarrier, SocketCarrier, StdioCarrier, WebSocketCarrier
from bridle.lmtp.client.websocket import endpoint_url
from bridle.lmtp.messages import FEATURES, UNAVAILABLE, EventMessage
from tests.lmtp.fakes import GenuineLike, continuation
from tests.waiting import PATIENCE

QUICK = RetryPolicy(backoff=0.0, retries=2, connect_attempts=2)
HASTY = RetryPolicy(first_token=0.02, between_tokens=0.02, backoff=0.0, retries=2)


class Scripted:
    """A server with the extensions. `script(request, link)` answers each GENERATE and SCORE of a connection."""

    def __init__(
        self, script: Callable[[dict[str, Any], ClientChannel], Awaitable[None]], features: Any = FEATURES
    ) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.heard = asyncio.Condition()
        self._script = script
        self._features = features

    async def serve(self, link: ClientChannel) -> None:
        while True:
            kind, _, text = (await link.receive()).partition(" ")
            body = json.loads(text)
            async with self.heard:
                self.requests.append((kind, body))
                self.heard.notify_all()
            if kind == "MODEL_INFO":
                info = {"model": "m", "lmtp": dict(self._features)}
                await link.send("MSG " + json.dumps([{"stream_id": body["stream_id"], "model_info": info}]))
            elif kind == "BUFFER":
                answer = {"stream_id": body["stream_id"], "buffer": body["name"], "num_tokens": 3}
                await link.send("MSG " + json.dumps([answer]))
            elif kind != "CANCEL":
                await self._script(body, link)

    def sent(self, kind: str) -> list[dict[str, Any]]:
        return [body for each, body in self.requests if each == kind]

    async def until(self, kind: str, count: int = 1) -> None:
        async with self.heard, asyncio.timeout(PATIENCE):
            await self.heard.wait_for(lambda: len(self.sent(kind)) >= count)

    @asynccontextmanager
    async def client(self, patience: RetryPolicy = QUICK, **options: Any) -> AsyncIterator[Client]:
        async with (
            asyncio.timeout(PATIENCE),
            Client(MemoryCarrier(self.serve), "m", patience=patience, **options) as client,
        ):
            yield client


async def say(link: ClientChannel, body: dict[str, Any], tokens: Iterable[int], reason: str | None = "length") -> None:
    tokens = list(tokens)
    for number, token in enumerate(tokens):
        last = reason if number == len(tokens) - 1 else None
        answer = {"token": token, "stream_id": body["stream_id"], "logprob": -1.0, "finish_reason": last, "text": "x"}
        await link.send("TOKEN " + json.dumps([answer]))


async def refuse(link: ClientChannel, body: dict[str, Any], **fields: Any) -> None:
    await link.send("TOKEN " + json.dumps([{"stream_id": body["stream_id"], "error": "no", **fields}]))


# -- what the real server does -----------------------------------------------------------------------------


def mangled(change: Callable[[str, Any], str]) -> Callable[[str], Iterable[str]]:
    def edit(frame: str) -> Iterable[str]:
        kind, _, text = frame.partition(" ")
        yield change(kind, json.loads(text))

    return edit


def with_field(**fields: Any) -> Callable[[str], Iterable[str]]:
    return mangled(lambda kind, objects: f"{kind} {json.dumps([{**each, **fields} for each in objects])}")


DEVIATIONS: dict[str, Callable[[str], Iterable[str]]] = {
    "an object instead of a list": mangled(lambda kind, objects: f"{kind} {json.dumps(objects[0])}"),
    "white space": lambda frame: (frame.replace(" ", "  ", 1) + "\n",),
    "formatted JSON": mangled(lambda kind, objects: f"{kind} {json.dumps(objects, indent=2)}"),
    "messages in one frame": lambda frame: (f"PONG {{}}\n{frame}\n{frame.split(' ')[0]} []",),
    "unknown types": lambda frame: ('SYS [{"a": 1}]', "PING", "", "TOKEN", "TOKEN {broken", "TOKEN [1, null]", frame),
    "foreign streams": lambda frame: (frame.replace('"stream_id": ', '"stream_id": 77'), frame),
    "extra fields": with_field(index=3, foo={"a": []}),
    "ids as text": mangled(
        lambda kind, objects: f"{kind} {json.dumps([{**o, 'stream_id': str(o['stream_id'])} for o in objects])}"
    ),
    "floats for tokens": mangled(
        lambda kind, objects: (
            f"{kind} {json.dumps([{**o, 'token': float(o['token'])} if 'token' in o else o for o in objects])}"
        )
    ),
    "no log-probabilities": with_field(logprob=None, top_logprobs=None),
    "NaN": with_field(logprob=math.nan),
}


@pytest.mark.parametrize("name", DEVIATIONS)
async def test_deviations_are_taken_as_meant(name: str) -> None:
    server = GenuineLike(edit=DEVIATIONS[name])
    async with asyncio.timeout(PATIENCE), Client(server.carrier, "m", patience=QUICK) as client:
        tokens = await (await client.generate([5, 6], max_tokens=3)).read()
        assert [token.token for token in tokens] == continuation([5, 6], 3)
        assert [token.finish_reason for token in tokens] == [None, None, "length"]
        assert [token.token for token in await client.score([1], [2, 3])] == [2, 3]
        assert (await client.model_info())["model"] == "m"


async def test_infinities_stay_and_alternatives_of_others_go() -> None:
    async with Client(GenuineLike().carrier, "m", patience=QUICK) as client:
        both = await (await client.generate([5], max_tokens=1, top_logprobs=2)).read()
        one = await (await client.generate([5], max_tokens=1)).read()
    assert both[0].top_logprobs == {both[0].token: -1.5, 96: -math.inf}
    assert one[0].top_logprobs == {one[0].token: -1.5}


async def test_old_server_hears_nothing_new() -> None:
    server = GenuineLike()
    async with Client(server.carrier, "m", patience=QUICK) as client:
        async with await client.generate([5], max_tokens=3) as stream:
            await anext(stream)
        await client.score([1], [2])
    assert {line.partition(" ")[0] for line in server.received} == {"MODEL_INFO", "GENERATE", "SCORE"}
    assert json.loads(server.received[1].partition(" ")[2]).keys() == {"stream_id", "model", "prompt", "max_tokens"}
    plain = GenuineLike()
    async with Client(plain.carrier, "m", plain=True) as client:
        await (await client.generate([5], max_tokens=1)).read()
    assert [line.partition(" ")[0] for line in plain.received] == ["GENERATE"]


async def test_refusals_by_msg_and_by_token_raise() -> None:
    def as_msg(frame: str) -> Iterable[str]:
        yield frame if frame.startswith("MSG") else 'MSG [{"stream_id": 2, "error": "not loaded"}]'

    async with Client(GenuineLike(edit=as_msg).carrier, "m", patience=QUICK) as client:
        with pytest.raises(RemoteError, match="not loaded"):
            await (await client.generate([5], max_tokens=1)).read()
    async with Client(GenuineLike().carrier, "m", patience=QUICK) as client:
        with pytest.raises(RemoteError, match="foo"):
            await (await client.generate([5], max_tokens=1, foo=1)).read()


async def test_text_needs_a_tokenizer_where_the_server_has_none() -> None:
    from tests.http.harness import tokenizer

    async with Client(GenuineLike().carrier, "m", patience=QUICK) as client:
        with pytest.raises(UnsupportedFeature, match="accepts only tokens"):
            await client.generate("Hello")
        client.tokenizer = tokenizer()
        stream = await client.generate("Hello", max_tokens=6)
        tokens = await stream.read()
    prompt = tokenizer().encode("Hello")
    assert [token.token for token in tokens] == continuation(prompt, 6)
    assert "".join(token.text or "" for token in tokens) == tokenizer().decode(continuation(prompt, 6))


async def test_bad_requests_are_refused_before_they_are_sent() -> None:
    server = GenuineLike()
    async with Client(server.carrier, "m") as client:
        for options in ({"max_tokens": 0}, {"max_tokens": "2"}, {"top_logprobs": 0}, {"temperature": "0"}):
            with pytest.raises(InvalidRequest):
                await client.generate([1], **options)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="scored is empty"):
            await client.score([1], [])
    assert not server.received


# -- errors, time-outs, retries -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"code": "context_length_exceeded", "param": "prompt"}, ContextOverflow),
        ({"code": "overloaded", "retry_after": 0.0, "retryable": False}, Overloaded),
        ({"code": "of_tomorrow"}, RemoteError),
        ({}, RemoteError),
    ],
)
async def test_errors_are_the_servers(fields: dict[str, Any], error: type[Exception]) -> None:
    async with Scripted(lambda body, link: refuse(link, body, **fields)).client() as client:
        with pytest.raises(error, match="no"):
            await (await client.generate([1])).read()


async def test_retryable_errors_are_retried_with_a_new_key() -> None:
    async def script(body: dict[str, Any], link: ClientChannel) -> None:
        if len(server.sent("GENERATE")) < 3:
            await refuse(link, body, code="overloaded", retryable=True, retry_after=0.001)
        else:
            await say(link, body, [7, 8])

    server = Scripted(script)
    async with server.client() as client:
        assert [token.token for token in await (await client.generate([1], max_tokens=2)).read()] == [7, 8]
    keys = [body["key"] for body in server.sent("GENERATE")]
    assert len(set(keys)) == 3


async def test_a_client_gives_up_after_its_retries() -> None:
    server = Scripted(lambda body, link: refuse(link, body, code="overloaded", retryable=True))
    async with server.client() as client:
        with pytest.raises(Overloaded):
            await (await client.generate([1])).read()
    assert len(server.sent("GENERATE")) == 1 + QUICK.retries


async def test_a_stream_that_lags_is_cancelled_and_goes_on_from_where_it_was() -> None:
    async def script(body: dict[str, Any], link: ClientChannel) -> None:
        if len(body["prompt"]) < 3:
            await say(link, body, [7, 8], reason=None)  # and then nothing
        else:
            await say(link, body, [9])

    server = Scripted(script)
    async with server.client(HASTY) as client:
        stream = await client.generate([1], max_tokens=3)
        assert [token.token for token in await stream.read()] == [7, 8, 9]
        await server.until("CANCEL")
    first, second = server.sent("GENERATE")
    assert server.sent("CANCEL") == [{"stream_id": first["stream_id"]}]
    assert (second["prompt"], second["max_tokens"]) == ([1, 7, 8], 1)


async def test_text_goes_on_behind_a_buffer() -> None:
    async def script(body: dict[str, Any], link: ClientChannel) -> None:
        await say(link, body, [7], reason=None) if "buffer" not in body else await say(link, body, [8])

    server = Scripted(script)
    async with server.client(HASTY) as client:
        stream = await client.generate("Once", max_tokens=2)
        assert [token.token for token in await stream.read()] == [7, 8]
    second = server.sent("GENERATE")[1]
    assert server.sent("BUFFER")[0]["prompt"] == "Once"
    assert second["buffer"] == server.sent("BUFFER")[0]["name"]
    assert second["prompt"] == [7] and second["text"] is True


async def test_constrained_streams_begin_again_only_if_they_must_repeat() -> None:
    async def script(body: dict[str, Any], link: ClientChannel) -> None:
        count = len(server.sent("GENERATE"))
        await say(link, body, [7, 8] if count == 1 else [7, 8, 9], reason=None if count == 1 else "stop")

    server = Scripted(script)
    async with server.client(HASTY) as client:
        stream = await client.generate([1], max_tokens=5, constraint={"regex": "a*"})
        assert [token.token for token in await stream.read()] == [7, 8, 9]
    server = Scripted(lambda body, link: say(link, body, [7], reason=None))
    async with server.client(HASTY) as client:
        with pytest.raises(DeadlineExceeded):
            await (await client.generate([1], temperature=1.0, constraint={"regex": "a*"})).read()
        assert len(server.sent("GENERATE")) == 1
    other = iter(([7], [8]))
    server = Scripted(lambda body, link: say(link, body, next(other), reason=None))
    async with server.client(HASTY) as client:
        with pytest.raises(ProtocolError, match="began the stream again with token 8, not 7"):
            await (await client.generate([1], constraint={"regex": "a*"})).read()


async def test_silence_times_out() -> None:
    async def silent(body: dict[str, Any], link: ClientChannel) -> None:
        pass

    server = Scripted(silent)
    async with server.client(HASTY) as client:
        with pytest.raises(DeadlineExceeded, match=r"no token within 0\.02 s"):
            await (await client.generate([1])).read()
    assert len(server.sent("GENERATE")) == 1 + HASTY.retries


async def test_notices_are_heard() -> None:
    async def script(body: dict[str, Any], link: ClientChannel) -> None:
        await link.send('EVENT [{"event": "draining", "seconds": 3}]')
        await link.send("EVENT " + json.dumps([{"event": "queued", "stream_id": body["stream_id"]}]))
        await say(link, body, [7])

    heard: list[EventMessage] = []
    async with Scripted(script).client(on_event=heard.append) as client:
        await (await client.generate([1])).read()
    assert [event.event for event in heard] == ["draining", "queued"]
    assert heard[0].data == {"seconds": 3}


async def test_branches_are_told_to_those_who_ask() -> None:
    async def script(body: dict[str, Any], link: ClientChannel) -> None:
        assert body["rewind"] == "event"
        i = body["stream_id"]
        fork = {"event": "fork", "stream_id": i, "position": 1, "branch": 1, "parent": 0, "num_tokens": 1}
        tokens = [
            {"token": 5, "stream_id": i, "position": 0},
            {"token": 6, "stream_id": i, "position": 2, "finish_reason": "stop"},
            {"token": 7, "stream_id": i, "position": 3, "branch": 1, "finish_reason": "stop"},
        ]
        await link.send("TOKEN " + json.dumps(tokens[:1]))
        await link.send("EVENT " + json.dumps([fork]))
        await link.send("TOKEN " + json.dumps(tokens[1:]))

    async with Scripted(script).client() as client:
        stream = await client.generate([1], max_tokens=1, rewind="event")
        items = [item async for item in stream.items()]
    assert [item.event if isinstance(item, EventMessage) else (item.token, item.branch) for item in items] == [
        (5, 0), "fork", (6, 0), (7, 1),
    ]  # fmt: skip


# -- leaving, waiting, closing --------------------------------------------------------------------------------


async def test_leaving_a_stream_cancels_it() -> None:
    server = Scripted(lambda body, link: say(link, body, [7], reason=None))
    async with server.client() as client:
        async with await client.generate([1]) as stream:
            await anext(stream)
        await server.until("CANCEL", 1)
        stream = await client.generate([1])
        await stream.cancel()
        with pytest.raises(RequestCancelled):
            await stream.read()
        await server.until("CANCEL", 2)
        stream = await client.generate([1])
        await anext(stream)
        del stream
        gc.collect()
        await server.until("CANCEL", 3)


async def test_places_are_bounded_and_come_back() -> None:
    server = Scripted(lambda body, link: say(link, body, [7], reason=None))
    async with server.client(max_streams=2) as client:
        first, second = [await client.generate([1]) for _ in range(2)]
        third = asyncio.ensure_future(client.generate([3]))
        await asyncio.sleep(0)
        assert not third.done()
        await first.cancel()
        await anext(await third)
        assert (await anext(second)).token == 7


async def test_what_nobody_reads_is_not_taken_from_the_server() -> None:
    async def script(body: dict[str, Any], link: ClientChannel) -> None:
        await say(link, body, [1] * body["max_tokens"])
        done.append(body["stream_id"])

    done: list[int] = []
    server = Scripted(script)
    async with server.client(max_unread=20) as client:
        unread = await client.generate([1], max_tokens=1000)
        for _ in range(500):
            await asyncio.sleep(0)
        assert 20 <= unread.num_unread < 200 and not done  # the channel holds some, the client stopped reading
        reader = await client.generate([2], max_tokens=2)
        assert len(await reader.read()) == 2  # one that is waited for gets through
        assert len(await unread.read()) == 1000


async def test_closing_ends_streams() -> None:
    server = Scripted(lambda body, link: say(link, body, [7], reason=None))
    async with server.client() as client:
        stream = await client.generate([1])
        await anext(stream)
    with pytest.raises(ConnectionLost, match="closed"):
        await anext(stream)
    with pytest.raises(ConnectionLost, match="closed"):
        await client.model_info()
    await client.close()


async def test_a_server_that_closes_on_every_request_is_given_up() -> None:
    async def hang_up(body: dict[str, Any], link: ClientChannel) -> None:
        raise ConnectionLost("bye")

    server = Scripted(hang_up)
    async with server.client() as client:
        with pytest.raises(ConnectionLost, match="3 times in a row"):
            await (await client.generate([1])).read()
        assert (await client.model_info())["model"] == "m"  # the client is as good as new


async def test_a_lost_stream_that_cannot_be_had_again_is_an_error() -> None:
    async def script(body: dict[str, Any], link: ClientChannel) -> None:
        await say(link, body, [7], reason=None)
        raise ConnectionLost("cut")

    server = Scripted(script, features={"cancel": True})
    async with server.client() as client:
        stream = await client.generate([1], temperature=1.0, presence_penalty=0.5)
        assert (await anext(stream)).token == 7
        with pytest.raises(ConnectionLost, match="cannot be continued"):
            await anext(stream)
    assert len(server.sent("GENERATE")) == 1


async def test_a_request_that_is_not_known_yet_keeps_its_key() -> None:
    async def script(body: dict[str, Any], link: ClientChannel) -> None:
        if len(server.sent("GENERATE")) == 1 and "prompt" in body:
            raise ConnectionLost("cut")
        await say(link, body, [7]) if "prompt" in body else await refuse(link, body, code="unknown_stream")

    server = Scripted(script)
    async with server.client() as client:
        assert len(await (await client.generate([1], max_tokens=1)).read()) == 1
    keys = [body["key"] for kind, body in server.requests if kind in ("GENERATE", "RESUME")]
    assert len(keys) == 3 and len(set(keys)) == 1


async def test_buffers_are_named_again() -> None:
    async def script(body: dict[str, Any], link: ClientChannel) -> None:
        if "prompt" not in body:  # a RESUME
            await refuse(link, body, code="unknown_stream", param="key")
        elif len(server.sent("GENERATE")) == 1:
            raise ConnectionLost("cut")
        else:
            await say(link, body, [7])

    server = Scripted(script)
    async with server.client() as client:
        assert await client.buffer("a", "Once") == 3
        await client.buffer("b", [1])
        await client.drop_buffer("b")
        assert len(await (await client.generate([1], buffer="a", max_tokens=1)).read()) == 1
    assert [(body["name"], body.get("drop")) for body in server.sent("BUFFER")] == [
        ("a", None), ("b", None), ("b", True), ("a", None),
    ]  # fmt: skip


async def test_model_info_waits_for_the_model() -> None:
    answers = iter([UNAVAILABLE, UNAVAILABLE, "Random(seed=7)"])

    def edit(frame: str) -> Iterable[str]:
        stream_id = json.loads(frame.partition(" ")[2])[0]["stream_id"]
        yield "MSG " + json.dumps({"stream_id": stream_id, "model_info": next(answers)})

    async with Client(GenuineLike(edit=edit).carrier, "m", patience=QUICK) as client:
        assert await client.model_info() == "Random(seed=7)"


# -- carriers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("localhost:8080", "ws://localhost:8080/"),
        ("localhost", "ws://localhost:8080/"),
        ("http://a:b@host:1/x?key=2", "ws://a:b@host:1/x?key=2"),
        ("https://host", "wss://host/"),
        ("ws://[::1]:9/", "ws://[::1]:9/"),
    ],
)
def test_an_address_becomes_a_websocket_url(endpoint: str, url: str) -> None:
    assert endpoint_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["ftp://x", "", "host:port", "ws://"])
def test_a_wrong_address_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidRequest):
        endpoint_url(endpoint)


def test_names_hide_secrets() -> None:
    assert WebSocketCarrier("http://user:secret@host:1").name == "ws://host:1/"
    assert WebSocketCarrier("http://host:1/x?ticket=secret").name == "ws://host:1/x"


async def test_a_server_that_is_not_there_is_connection_lost() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with Client(f"127.0.0.1:{unused.getsockname()[1]}", "m", patience=QUICK) as client:
            with pytest.raises(ConnectionLost, match="cannot be reached"):
                await client.connect()
            with pytest.raises(ConnectionLost, match="cannot be reached"):
                await (await client.generate([1])).read()
    async with Client(StdioCarrier(["no-such-program-anywhere"]), "m", patience=QUICK) as client:
        with pytest.raises(ConnectionLost, match="cannot be started"):
            await client.connect()


CHILD = """
import asyncio, socket, sys
from tests.lmtp.fakes import GenuineLike

class Lines:
    def __init__(self, read, write):
        self.read, self.write = read, write
    async def receive(self):
        line = await asyncio.to_thread(self.read.readline)
        if not line:
            sys.exit()
        return line
    async def send(self, message):
        print(message, file=self.write, flush=True)

if len(sys.argv) > 1:
    both = socket.socket(fileno=int(sys.argv[1]))
    link = Lines(both.makefile("r"), both.makefile("w"))
else:
    link = Lines(sys.stdin, sys.stdout)
asyncio.run(GenuineLike().serve(link))
"""


async def test_child_on_standard_input_and_output() -> None:
    async with (
        asyncio.timeout(PATIENCE),
        Client(StdioCarrier([sys.executable, "-c", CHILD]), "m", patience=QUICK) as client,
    ):
        assert [t.token for t in await (await client.generate([5], max_tokens=3)).read()] == continuation([5], 3)


async def test_another_process_behind_a_socket() -> None:
    ours, theirs = socket.socketpair()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, str(theirs.fileno()), pass_fds=[theirs.fileno()]
    )
    theirs.close()
    async with asyncio.timeout(PATIENCE), Client(SocketCarrier(lambda: ours), "m", patience=QUICK) as client:
        assert [t.token for t in await (await client.generate([5], max_tokens=3)).read()] == continuation([5], 3)
    await process.wait()


def test_the_twin_for_threads() -> None:
    with SyncClient(GenuineLike().carrier, "m", patience=QUICK) as client:
        stream = client.generate([5], max_tokens=3)
        assert [token.token for token in stream] == continuation([5], 3)
        assert stream.finish_reason == "length"
        assert [token.token for token in client.score([1], [2, 3])] == [2, 3]
        assert client.model_info()["model"] == "m"
        with client.generate([5], max_tokens=3) as left:
            next(iter(left))
        with pytest.raises(UnsupportedFeature, match="no buffers"):
            client.buffer("a", [1])
    client.close()
