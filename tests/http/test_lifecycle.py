"""Tests of clients that disconnect, stall or arrive in large numbers: requests of disconnected clients end at once, and
other clients are not affected."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bridle.engine.request import Request
from bridle.errors import ControllerError, EngineClosed, InternalError, Overloaded, RequestCancelled, ShardUnavailable
from bridle.http import HttpSettings, create_app
from bridle.http.middleware.request_context import RequestContext, run_while_connected
from bridle.http.sse import SseResponse, SseWriter
from bridle.outputs import Event, Finished, FinishReason, TokenEvent
from bridle.serving import LoadedModel, ModelRegistry
from tests.http.harness import local_client, raw_request, saying, scripted_model, served
from tests.serving.fakes import FakeClient, fake_model, prompt_event, say
from tests.waiting import PATIENCE

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WAIT = PATIENCE  # seconds after which something that should happen at once counts as missing
BODIES = [
    (COMPLETIONS, {"prompt": "a", "max_tokens": 100}),
    (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 100}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
]


def fake_of(model: LoadedModel) -> FakeClient:
    client: Any = model.client
    return client  # type: ignore[no-any-return]


def ended_by(event: Finished) -> Any:
    """Return a script of a fake engine that writes "ab" and then ends with the reason and the error of `event`."""

    def script(request: Request) -> Iterator[list[Event]]:
        yield [prompt_event(request), TokenEvent(request.id, 0, 97, "ab")]
        yield [Finished(request.id, 0, event.reason, error=event.error)]

    return script


# -- leaving ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_cancels_its_requests(path: str, body: dict[str, Any], is_stream: bool) -> None:
    model = fake_model(say("hello"), is_endless=True)
    with served(model) as url:
        connection = raw_request(url, path, body | {"stream": is_stream})
        assert fake_of(model).submitted.wait(WAIT)
        if is_stream:
            connection.recv(10)
        connection.close()
        num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
        # All prompts of a call are submitted in one go, so the first one's end follows the last one's start.
        assert fake_of(model).streams[0].gone.wait(WAIT)
        assert len(fake_of(model).streams) == num_prompts
        assert all(stream.gone.wait(WAIT) for stream in fake_of(model).streams)
        assert httpx.get(url + "/health/ready").status_code == 200


@pytest.mark.parametrize("is_stream", [True, False])
async def test_what_a_client_left_is_counted(is_stream: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def two_tokens(request: Request) -> list[list[Event]]:
        return [[prompt_event(request)], [TokenEvent(request.id, 0, 97, "a"), TokenEvent(request.id, 0, 98, "b")]]

    model = fake_model(two_tokens, is_endless=True)
    app = create_app(ModelRegistry([model]))
    body = json.dumps({"prompt": "abc", "stream": is_stream, "max_tokens": 5}).encode()
    inbox = [{"type": "http.request", "body": body}]

    async def receive() -> Any:
        if inbox:
            return inbox.pop()
        await fake_of(model).said_all.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": headers, "query_string": b""}
    await app(scope, receive, send)  # type: ignore[arg-type]
    state = app.state.http
    assert state.admission.num_requests == 0
    metrics = state.metrics.render().decode()
    assert f'bridle_http_requests_total{{model="fake",route="{COMPLETIONS}",status="499"}} 1.0' in metrics
    assert 'bridle_http_tokens_total{kind="prompt",model="fake"} 3.0' in metrics
    assert 'bridle_http_tokens_total{kind="completion",model="fake"} 2.0' in metrics
    assert 'bridle_http_choices_total{model="fake",reason="cancelled"} 1.0' in metrics
    assert "the client disconnected" in capsys.readouterr().out


PREPARED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "abc", "regex": "a+"}),
    (COMPLETIONS, {"prompt": "a" * 5_000}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
    ("/v1/responses", {"input": "a"}),
    ("/generate", {"inputs": "abc", "parameters": {"grammar": {"type": "regex", "value": "a+"}}}),
]


@pytest.mark.parametrize(("path", "body"), PREPARED)
@pytest.mark.parametrize("ends", ["left", "late"])
async def test_a_request_that_is_still_being_prepared_ends_at_once(path: str, body: dict[str, Any], ends: str) -> None:
    """A request ends at once, even while its constraint compiles, its template renders, or its text is tokenized."""
    began, never = asyncio.Event(), asyncio.Event()

    class Slow(LoadedModel):
        async def try_constraint(self, constraint: object) -> None:
            began.set()
            await never.wait()

        async def in_text_thread(self, *work: Any, **options: Any) -> Any:
            began.set()
            await never.wait()

    fake = fake_model()
    app = create_app(ModelRegistry([Slow("fake", fake.client, fake.tokenizer)]))
    terms = {"deadline": 0.05} if ends == "late" else {}
    told = body | ({"parameters": body["parameters"] | terms} if path == "/generate" else terms)
    inbox = [{"type": "http.request", "body": json.dumps(told).encode()}]
    outbox: list[Any] = []

    async def receive() -> Any:
        if inbox:
            return inbox.pop()
        await (began if ends == "left" else never).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        outbox.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    async with asyncio.timeout(WAIT):
        await app(scope, receive, send)  # type: ignore[arg-type]
    assert outbox[0]["status"] == (499 if ends == "left" else 504)
    assert app.state.http.admission.num_requests == 0 and fake_of(fake).requests == []


def test_a_client_that_reads_to_the_end_cancels_nothing() -> None:
    model = fake_model(say("hello"))
    with local_client(model) as client:
        for is_stream in (True, False):
            client.post(COMPLETIONS, json={"prompt": "a", "stream": is_stream}).raise_for_status()
    assert not any(stream.is_cancelled for stream in fake_of(model).streams)


def test_a_refused_prompt_submits_none_of_its_neighbors() -> None:
    model = fake_model()
    with local_client(model) as client:
        assert client.post(COMPLETIONS, json={"prompt": ["a", "b", ""]}).status_code == 400
    assert fake_of(model).requests == []


def test_a_submission_that_fails_cancels_the_ones_before_it() -> None:
    model = fake_model(is_endless=True)
    fake = fake_of(model)
    submit = fake.submit

    def submit_twice(request: Request) -> Any:
        if len(fake.requests) == 2:
            raise Overloaded("2 requests wait already; at most 2", 7.0)
        return submit(request)

    fake.submit = submit_twice  # type: ignore[method-assign]
    with local_client(model) as client:
        answer = client.post(COMPLETIONS, json={"prompt": ["a", "b", "c"]})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        assert [stream.is_cancelled for stream in fake.streams] == [True, True]


# -- stalling -----------------------------------------------------------------------------------------------


def test_a_reader_that_stalls_is_cut() -> None:
    def flood(request: Request) -> Iterator[list[Event]]:
        yield [prompt_event(request)]
        while True:
            yield [TokenEvent(request.id, 0, 97, "a" * 65_536)]

    model = fake_model(flood)
    with served(model, HttpSettings(send_timeout=0.2)) as url:
        connection = raw_request(url, COMPLETIONS, {"prompt": "a", "stream": True, "max_tokens": 100})
        assert fake_of(model).submitted.wait(WAIT)
        assert fake_of(model).streams[0].gone.wait(WAIT)
        connection.close()


async def test_a_write_that_takes_too_long_raises() -> None:
    async def never(message: object) -> None:
        await asyncio.Event().wait()

    with pytest.raises(RequestCancelled, match=r"did not read for 0\.01 seconds"):
        await SseWriter(never, 0.01).send({})


async def test_a_client_that_takes_no_ping_is_cut_while_nothing_else_is_sent() -> None:
    ended: list[str] = []

    async def silent(writer: SseWriter) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("produced")

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    call = RequestContext(id="a", route="GET /", method="GET", path="/")
    response = SseResponse(silent, HttpSettings(ping_interval=0.01, send_timeout=0.01))
    async with asyncio.timeout(WAIT):
        await response({"type": "http", "state": {"call": call}}, receive, send)
    assert isinstance(call.error, RequestCancelled) and "did not read" in str(call.error)
    assert ended == ["produced"]


async def test_an_error_beside_pings_is_told_as_it_is() -> None:
    sent: list[Any] = []

    async def broken(writer: SseWriter) -> None:
        await writer.send({})
        raise ControllerError("no more")

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    call = RequestContext(id="a", route="GET /", method="GET", path="/")
    await SseResponse(broken, HttpSettings())({"type": "http", "state": {"call": call}}, receive, send)
    assert isinstance(call.error, ControllerError)
    assert b"no more" in sent[-2]["body"] and not sent[-1]["more_body"]


def heard(url: str, data: bytes, before: bytes = b"") -> bytes:
    """Return all bytes that a server answers to `data` on a new connection. The request `before`, if given, is answered
    first. The data is sent again if a busy server closed the connection without an answer."""
    host, port = url.removeprefix("http://").split(":")
    answer = b""
    while not answer:
        with (
            socket.create_connection((host, int(port))) as connection,
            contextlib.suppress(ConnectionResetError, BrokenPipeError),
        ):
            if before:
                connection.sendall(before)
                told = b""
                while not told.endswith(b"}") and (piece := connection.recv(65_536)):
                    told += piece
            connection.sendall(data)
            while piece := connection.recv(65_536):
                answer += piece
    return answer


def test_a_body_that_does_not_arrive_is_a_408() -> None:
    with served(fake_model(), HttpSettings(receive_timeout=0.1)) as url:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        answer = heard(url, head + b'Content-Length: 100\r\n\r\n{"prompt"')
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"did not arrive within 0.1 seconds" in answer


@pytest.mark.parametrize("is_first", [True, False])
def test_a_head_that_does_not_end_is_a_408(is_first: bool) -> None:
    whole = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    with served(fake_model(), HttpSettings(receive_timeout=0.2)) as url:
        host, port = url.removeprefix("http://").split(":")
        answer = heard(url, whole[:-2], b"" if is_first else whole)
        with socket.create_connection((host, int(port))) as mute:
            assert mute.recv(1) == b""
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"did not arrive within 0.2 seconds" in answer


def test_large_heads_are_a_431_and_the_next_connection_is_served() -> None:
    with served(fake_model()) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Large: " + b"a" * 20_000)
            answer = connection.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 431")
        assert b"headers exceed 16384 bytes" in answer
        # Many requests with ordinary heads on one connection do not add up.
        with httpx.Client(base_url=url, headers={"x-pad": "a" * 5_000}) as client:
            assert [client.get("/health").status_code for _ in range(8)] == [200] * 8
            long = client.post(COMPLETIONS, json={"prompt": "a", "user": "x" * 100_000})
            assert long.status_code == 200


async def test_quiet_streams_get_pings() -> None:
    model = fake_model(lambda request: [], is_endless=True)
    with served(model, HttpSettings(ping_interval=0.02)) as url:
        async with (
            httpx.AsyncClient(base_url=url) as client,
            client.stream("POST", COMPLETIONS, json={"prompt": "a", "stream": True}) as answer,
        ):
            lines = answer.aiter_lines()
            assert await anext(lines) == ": ping"


# -- crowds -------------------------------------------------------------------------------------------------


def test_more_than_the_limit_get_a_429_and_places_come_back() -> None:
    model = fake_model(say("hello"), is_endless=True)
    settings = HttpSettings(max_requests=2)
    with served(model, settings) as url, httpx.Client(base_url=url) as client:
        held = [raw_request(url, COMPLETIONS, {"prompt": "a", "stream": True}) for _ in range(2)]
        for connection in held:
            assert connection.recv(10)  # admitted: the answer has begun
        answer = client.post(COMPLETIONS, json={"prompt": "a"})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
        assert "2 requests are in flight, and this call wants 1 more; at most 2" in error["message"]
        assert client.get("/health/ready").status_code == 200
        for connection in held:
            connection.close()
        assert all(stream.gone.wait(WAIT) for stream in fake_of(model).streams)


def test_prompt_tokens_in_flight_are_bounded_but_one_prompt_always_fits() -> None:
    model = fake_model(say("hello"), is_endless=True, max_model_len=256)
    with served(model, HttpSettings(max_prompt_tokens=1)) as url, httpx.Client(base_url=url) as client:
        held = raw_request(url, COMPLETIONS, {"prompt": "a" * 200, "stream": True})
        assert held.recv(10)
        answer = client.post(COMPLETIONS, json={"prompt": "a" * 57})
        assert answer.status_code == 429
        assert "200 tokens are in flight, and this call wants 57 more; at most 256" in answer.json()["error"]["message"]
        held.close()


def test_every_place_comes_back_whatever_happened() -> None:
    model = scripted_model(next_token=saying("Hello there."))
    with local_client(model, HttpSettings(max_requests=4)) as client:
        for body in (
            {"prompt": "Say", "max_tokens": 50},
            {"prompt": ["Say", "Tell"], "max_tokens": 50, "stream": True},
            {"prompt": "Say", "max_tokens": 100_000},
            {"prompt": ["Say"] * 5},
            {"prompt": ["Say", ""]},
            {"prompt": "Say", "model": "x"},
        ):
            client.post(COMPLETIONS, json=body)
            client.post(CHAT, json={"messages": [{"role": "user", "content": "x"}], **body})
        admission = client.app.state.http.admission  # type: ignore[attr-defined]
        assert (admission.num_requests, admission.num_tokens) == (0, 0)
        statistics = model.client.statistics()
        assert statistics.num_running == statistics.num_waiting == 0


# -- failures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "status", "code", "message"),
    [
        (Finished("", 0, FinishReason.ERROR, error=ControllerError("it broke")), 422, "controller_error", "it broke"),
        (Finished("", 0, FinishReason.ERROR, error=ShardUnavailable("gone")), 503, "shard_unavailable", "gone"),
        (Finished("", 0, FinishReason.ERROR, error=InternalError("bug")), 500, "internal_error", "bug"),
        (Finished("", 0, FinishReason.DEADLINE), 504, "deadline_exceeded", "did not finish within"),
        (Finished("", 0, FinishReason.CANCELLED), 503, "engine_closed", "cancelled by the server"),
    ],
)
@pytest.mark.parametrize(("path", "body"), [BODIES[0], BODIES[2]])
def test_failures_have_a_status_or_are_the_last_event(
    path: str, body: dict[str, Any], event: Finished, status: int, code: str, message: str
) -> None:
    with local_client(fake_model(ended_by(event))) as client:
        answer = client.post(path, json=body)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == code
        assert message in answer.json()["error"]["message"]

        streamed = client.post(path, json=body | {"stream": True})
        assert streamed.status_code == 200
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert events[-1] == answer.json()
        assert "[DONE]" not in streamed.text
        text = "".join(
            choice.get("text") or choice.get("delta", {}).get("content") or ""
            for each in events[:-1]
            for choice in each["choices"]
        )
        assert text == "ab"


def test_a_deadline_ends_a_request_of_the_real_engine() -> None:
    with local_client(scripted_model(), HttpSettings(request_timeout=1e-9)) as client:
        answer = client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 400, "ignore_eos": True})
        assert answer.status_code == 504


async def test_what_ends_with_the_model_is_told() -> None:
    """Work that still waits for a thread when the model is closed raises an error that says so."""
    model = fake_model()
    held, began = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        held.wait(WAIT)

    async def never() -> Any:
        await asyncio.Event().wait()

    holding = [asyncio.ensure_future(model.in_text_thread(hold)) for _ in range(16)]  # more than there are threads
    waiting = asyncio.create_task(run_while_connected(never, model.in_text_thread(str)))
    await asyncio.to_thread(began.wait, WAIT)
    model.close()
    held.set()
    with pytest.raises(EngineClosed):
        await waiting
    await asyncio.gather(*holding, return_exceptions=True)


def test_draining_turns_new_generations_away_and_nothing_else() -> None:
    with local_client(fake_model()) as client:
        client.app.state.http.begin_drain()  # type: ignore[attr-defined]
        for path, body in BODIES:
            answer = client.post(path, json=body)
            assert answer.status_code == 503
            assert "shutting down" in answer.json()["error"]["message"]
        assert client.get("/health/ready").json() == {"status": "shutting down"}
        assert [client.get(path).status_code for path in ("/health/live", "/health", "/v1/models")] == [200] * 3
