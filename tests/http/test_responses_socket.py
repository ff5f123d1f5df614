"""Tests of responses over a WebSocket in this process: several in a row, continued, refused, abandoned and ended."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient, WebSocketDenialResponse, WebSocketTestSession
from starlette.websockets import WebSocketDisconnect

from bridle.http import HttpSettings, create_app
from bridle.http.openai.responses import socket as responses_socket
from bridle.serving import ModelRegistry
from bridle.serving.tenancy.keys import KeyStore
from bridle.serving.tenancy.loop_throttle import MAX_USELESS
from tests.http.harness import local_client, saying, scripted_model
from tests.http.tool_calls import HERMES, a_tokenizer, events_of
from tests.waiting import PATIENCE, until

TERMINAL = ("response.completed", "response.failed", "response.incomplete", "error")


def a_model() -> Any:
    text = a_tokenizer(HERMES)
    return scripted_model(text=text, next_token=saying("Yes.", text), max_model_len=2048)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with local_client(a_model(), HttpSettings(cors_origins=("https://friend.example",))) as client:
        yield client


def connect(client: TestClient, **headers: str) -> WebSocketTestSession:
    return client.websocket_connect("/v1/responses", headers=headers)


def send(socket: WebSocketTestSession, said: Any = "Well?", **options: Any) -> None:
    body = {"type": "response.create", "input": said, "temperature": 0, "max_output_tokens": 50, "store": False}
    socket.send_text(json.dumps(body | options))


def turn(socket: WebSocketTestSession) -> list[dict[str, Any]]:
    """Return the events of a response, up to its last event."""
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] not in TERMINAL:
        events.append(socket.receive_json())
    return events


def ask(socket: WebSocketTestSession, said: Any = "Well?", **options: Any) -> dict[str, Any]:
    send(socket, said, **options)
    return turn(socket)[-1]


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of events. Consecutive equal types are listed once, because a delta may have several tokens."""
    return [kind for kind, _ in groupby(event["type"] for event in events)]


def test_the_events_are_those_of_a_stream(client: TestClient) -> None:
    body = {"input": "Well?", "temperature": 0, "max_output_tokens": 50, "stream": True, "seed": 1}
    told = events_of(client.post("/v1/responses", json=body))
    with connect(client) as socket:
        for _ in range(2):  # responses of a connection are numbered each from 0
            send(socket, seed=1)
            events = turn(socket)
            assert kinds(events) == kinds(told)
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            last, other = events[-1]["response"], told[-1]["response"]
            assert last["output"][0]["content"] == other["output"][0]["content"]
            assert set(last) == set(other)


def test_messages_wait_for_the_response_before_theirs(client: TestClient) -> None:
    with connect(client) as socket:
        for word in ("One?", "Two?"):
            send(socket, word, metadata={"asked": word})
        asked = [turn(socket)[-1]["response"]["metadata"]["asked"] for _ in range(2)]
    assert asked == ["One?", "Two?"]


def test_what_is_not_stored_is_gone_on_from_over_its_connection_alone(client: TestClient) -> None:
    passing = client.app.state.http.passing  # type: ignore[attr-defined]
    with connect(client) as socket:
        first = ask(socket)["response"]
        assert first["store"] is False
        second = ask(socket, "And?", previous_response_id=first["id"])["response"]
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        with connect(client) as other:
            refused = ask(other, "And?", previous_response_id=second["id"])
        assert (refused["status"], refused["error"]["code"]) == (400, "previous_response_not_found")
        assert refused["error"]["param"] == "previous_response_id"
        older = ask(socket, "And?", previous_response_id=first["id"])  # the latest one alone is kept
        assert older["error"]["code"] == "previous_response_not_found"
        assert client.get(f"/v1/responses/{second['id']}").status_code == 404
        ask(socket)
        assert len(passing) == 1
    until(lambda: len(passing) == 0)


def test_a_turn_that_fails_ends_its_chain(client: TestClient) -> None:
    with connect(client) as socket:
        first = ask(socket)["response"]
        result = [{"type": "function_call_output", "call_id": "call_x", "output": "There."}]
        failed = ask(socket, result, previous_response_id=first["id"])
        assert (failed["type"], failed["status"]) == ("error", 400)
        stale = ask(socket, "And?", previous_response_id=first["id"])
        assert stale["error"]["code"] == "previous_response_not_found"
        assert ask(socket)["type"] == "response.completed"


def test_a_prompt_can_be_computed_alone(client: TestClient) -> None:
    with connect(client) as socket:
        send(socket, "Well, what is it? " * 8, generate=False)
        events = turn(socket)
        assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.completed"]
        warm = events[-1]["response"]
        assert (warm["output"], warm["max_output_tokens"]) == ([], 50)
        answered = ask(socket, "And?", previous_response_id=warm["id"])["response"]
        assert answered["usage"]["input_tokens_details"]["cached_tokens"] > 0
        assert answered["output"][0]["content"][0]["text"] == "Yes."


def test_what_is_stored_is_found_everywhere(client: TestClient) -> None:
    with connect(client) as socket:
        first = ask(socket, store=True)["response"]
    assert client.get(f"/v1/responses/{first['id']}").json() == first
    with connect(client) as socket:
        assert ask(socket, "And?", previous_response_id=first["id"])["type"] == "response.completed"
    answer = client.post("/v1/responses", json={"input": "And?", "previous_response_id": first["id"]})
    assert answer.json()["previous_response_id"] == first["id"]


BAD = [
    ("{", "not valid JSON"),
    ("[]", "type is []; must be 'response.create'"),
    ('{"type": "response.cancel"}', "type is 'response.cancel'; must be 'response.create'"),
    ('{"type": "response.create"}', "input is required"),
    ('{"type": "response.create", "input": "a", "background": true}', "background is true"),
    ('{"type": "response.create", "input": "a", "temperature": "hot"}', "temperature is 'hot'"),
    ('{"type": "response.create", "input": "a", "temprature": 1}', "did you mean 'temperature'?"),
    ('{"type": "response.create", "input": "a", "model": "other"}', "'other'"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "said"), BAD)
def test_bad_messages_are_told_and_the_connection_goes_on(client: TestClient, message: str, said: str) -> None:
    with connect(client) as socket:
        socket.send_text(message)
        event = socket.receive_json()
        assert (event["type"], event["status"] in (400, 404)) == ("error", True)
        assert said in event["error"]["message"]
        assert {"code", "message", "type", "param"} <= set(event["error"])
        socket.send_bytes(b'{"type": "response.create", "input": "a", "max_output_tokens": 9}')
        assert turn(socket)[-1]["type"] == "response.completed"


def test_pages_of_others_may_not_use_a_users_browser(client: TestClient) -> None:
    for origin in ("http://evil.example", "null"):
        with pytest.raises(WebSocketDisconnect) as refused, connect(client, origin=origin):
            pass
        assert refused.value.code == 1008
    for origin in ("http://testserver", "https://friend.example"):
        with connect(client, origin=origin) as socket:
            assert ask(socket)["type"] == "response.completed"


def test_users_are_told_apart(tmp_path: Path) -> None:
    keys, registry = KeyStore(tmp_path / "keys.db"), ModelRegistry([a_model()])
    names = {user: "Bearer " + keys.add(user) for user in ("alice", "bob")}
    with TestClient(create_app(registry, keys=keys)) as client:
        with pytest.raises(WebSocketDenialResponse) as denied, connect(client):
            pass
        assert denied.value.status_code == 401
        with connect(client, authorization=names["alice"]) as socket:
            stored = ask(socket, store=True)["response"]
        with connect(client, authorization=names["bob"]) as socket:
            refused = ask(socket, "And?", previous_response_id=stored["id"])
            assert refused["error"]["code"] == "previous_response_not_found"
    keys.close()
    registry.close()


class Held:
    """A model that writes a token and then waits until the test lets it continue."""

    def __init__(self) -> None:
        self.is_open, self.num_tokens = threading.Event(), 0
        self.model = scripted_model(next_token=self._next, text=a_tokenizer(HERMES))

    def _next(self, prefix: Any) -> int:
        self.num_tokens += 1
        if self.num_tokens > 1:
            assert self.is_open.wait(PATIENCE)
        return 70


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.is_open.set()


def begun(socket: WebSocketTestSession) -> None:
    """Wait until a response is being written."""
    while socket.receive_json()["type"] != "response.output_text.delta":
        pass


def test_a_client_that_leaves_ends_its_response(held: Held) -> None:
    with local_client(held.model) as client:
        with connect(client) as socket:
            send(socket, max_output_tokens=200)
            begun(socket)
        held.is_open.set()
        http = client.app.state.http  # type: ignore[attr-defined]
        until(lambda: http.admission.num_requests == 0)
        assert held.num_tokens < 200


def test_only_so_many_messages_wait(held: Held) -> None:
    with local_client(held.model) as client, connect(client) as socket:
        send(socket)
        begun(socket)
        for _ in range(responses_socket.MAX_WAITING + 1):
            send(socket)
        while (event := socket.receive_json())["type"] != "error":
            pass
        assert "too many messages are waiting" in event["error"]["message"]
        with pytest.raises(WebSocketDisconnect) as ended:
            socket.receive_json()
        assert ended.value.code == 1008
        held.is_open.set()


def test_only_so_many_useless_messages_are_heard(client: TestClient) -> None:
    def flood() -> None:
        for _ in range(2 * MAX_USELESS):
            socket.send_text("{")
            socket.receive_json()

    with connect(client) as socket:
        with pytest.raises(WebSocketDisconnect) as ended:
            flood()
        assert ended.value.code == 1008


def test_a_connection_ends_after_its_time(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_socket, "MAX_SECONDS", 0.0)
    with connect(client) as socket:
        assert socket.receive_json()["error"]["code"] == "websocket_connection_limit_reached"
        with pytest.raises(WebSocketDisconnect):
            socket.receive_json()


def test_a_server_that_shuts_down_lets_the_response_end(held: Held) -> None:
    with local_client(held.model) as client, connect(client) as socket, connect(client) as idle:
        send(socket, max_output_tokens=5)
        begun(socket)
        client.portal.call(client.app.state.http.begin_drain)  # type: ignore[union-attr,attr-defined]
        held.is_open.set()
        assert turn(socket)[-1]["type"] == "response.incomplete"
        for each in (socket, idle):
            with pytest.raises(WebSocketDisconnect) as ended:
                each.receive_json()
            assert ended.value.code == 1001


def test_a_server_that_ends_tells_its_clients(held: Held) -> None:
    with local_client(held.model) as client, connect(client) as socket:
        send(socket)
        begun(socket)
        client.portal.call(client.app.state.http.close_fronts)  # type: ignore[union-attr,attr-defined]
        while (event := socket.receive_json())["type"] != "error":
            pass
        assert event["error"]["code"] == "engine_closed"
        held.is_open.set()
