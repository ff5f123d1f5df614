"""Controllers call the operator's tools on every route. Each user's controllers can call only the tools granted to that
user."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.controller_tools import ClientTool, ToolExecutor, function_tools
from bridle.controller_tools.access import ToolPermission
from bridle.http import HttpSettings
from bridle.serving.tenancy.keys import KeyStore
from tests.http.harness import scripted_model, served
from tests.http.routes import ROUTES, of_eight, post, text_of
from tests.http.tool_calls import Says, told
from tests.waiting import until

KEYS: dict[str, str] = {}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    keys = KeyStore(Path(tmp_path_factory.mktemp("keys")) / "keys.db")
    for user in ("anna", "otto"):
        KEYS[user] = keys.add(user)
    tools = function_tools({"greet": lambda: "hi", "annas": lambda: "hi anna"})
    tools["ask"] = ClientTool("Asks the person at the other end.")
    desk = ToolExecutor(tools, grants={"annas": ToolPermission(users=frozenset({"anna"}))})
    settings = HttpSettings(controller_classes={"Says": Says})
    with served(scripted_model(tools=desk), settings, keys) as url, httpx.Client(base_url=url, timeout=600) as client:
        client.headers["Authorization"] = f"Bearer {KEYS['anna']}"
        yield client
    desk.close()
    keys.close()


@pytest.mark.parametrize("route", ROUTES)
def test_a_tool_answers_into_the_text(server: httpx.Client, route: str) -> None:
    answer = post(server, route, of_eight(route, {"controller": "class:Says", "controller_arg": "greet"}))
    assert text_of(answer) == "hi"


@pytest.mark.parametrize(("user", "text"), [("anna", "hi anna"), ("otto", "refused")])
def test_each_user_has_his_own_tools(server: httpx.Client, user: str, text: str) -> None:
    body = {"prompt": "x", "max_tokens": 20, "controller": "class:Says", "controller_arg": "annas"}
    answer = server.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {KEYS[user]}"})
    assert answer.json()["choices"][0]["text"] == text


def test_calls_are_counted(server: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 20, "controller": "class:Says", "controller_arg": "greet"}
    assert server.post("/v1/completions", json=body).status_code == 200
    metrics = server.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("bridle_tool_"))
    assert float(lines['bridle_tool_calls_total{tool="greet"}']) >= 1
    assert float(lines['bridle_tool_failures_total{tool="greet"}']) == 0
    assert 'bridle_tool_running{tool="annas"}' in lines
    assert 'bridle_tool_seconds_total{tool="greet"}' in lines


# -- tools of the client -------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["/v1/run", "/v1/completions", "/v1/chat/completions"])
def test_a_human_is_asked_in_the_middle_of_a_text(server: httpx.Client, route: str) -> None:
    fields = of_eight(route, {"controller": "class:Says", "controller_arg": "ask", "stream": True})
    if route == "/v1/run":
        del fields["stream"]
    body, _ = ROUTES[route]
    with server.stream("POST", route, json=body | fields) as stream:
        assert stream.status_code == 200
        lines = stream.iter_lines()
        call_id, wanted = told(lines)
        assert wanted == {"name": "ask", "arguments": {}}
        otto = {"Authorization": f"Bearer {KEYS['otto']}"}
        foreign = server.post(f"/v1/tool_results/{call_id}", json={"result": "no"}, headers=otto)
        assert foreign.status_code == 400 and "of this user waits for an answer" in foreign.text
        assert server.post(f"/v1/tool_results/{call_id}", json={"result": "yes"}).status_code == 204
        rest = "".join(lines)
    assert "yes" in rest or ("y" in rest and "es" in rest)
    late = server.post(f"/v1/tool_results/{call_id}", json={"result": "again"})
    assert late.status_code == 400


def of(user: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[user]}"}


@pytest.mark.parametrize("route", ["/v1/run", "/v1/completions", "/v1/chat/completions"])
def test_a_request_names_tools_that_its_client_answers(server: httpx.Client, route: str) -> None:
    fields = of_eight(
        route, {"controller": "class:Says", "controller_arg": "phone.home", "client_tools": ["phone.home"]}
    )
    body = ROUTES[route][0] | fields | ({} if route == "/v1/run" else {"stream": True})
    with server.stream("POST", route, json=body) as stream:
        lines = stream.iter_lines()
        call_id, wanted = told(lines)
        assert wanted == {"name": "phone.home", "arguments": {}}
        assert server.post(f"/v1/tool_results/{call_id}", json={"error": "no"}, headers=of("otto")).status_code == 400
        assert server.post(f"/v1/tool_results/{call_id}", json={"error": "no"}).status_code == 204
        assert "refused" in re.sub(r"[^a-z]", "", "".join(re.findall(r'"(?:text|content)": ?"(\w+)"', "".join(lines))))


def waiting(server: httpx.Client, user: str, name: str) -> list[dict[str, Any]]:
    calls = server.get("/v1/tool_results", headers=of(user)).json()["data"]
    return [call for call in calls if call["name"] == name]


@pytest.mark.parametrize("route", ROUTES)
def test_calls_are_listed_for_who_has_no_stream(server: httpx.Client, route: str) -> None:
    name = f"ask-{route}"
    fields = of_eight(route, {"controller": "class:Says", "controller_arg": name, "client_tools": [name]})
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(post, server, route, fields)
        (call,) = until(lambda: waiting(server, "anna", name))
        assert call == {"id": call["id"], "object": "tool_call", "name": name, "arguments": {}}
        assert waiting(server, "otto", name) == []
        assert server.post(f"/v1/tool_results/{call['id']}", json={"result": "yes"}).status_code == 204
        assert text_of(asking.result()) == "yes"
    assert waiting(server, "anna", name) == []


def test_a_call_ends_with_its_clients_stream(server: httpx.Client) -> None:
    body = {"prompt": "x", "stream": True, "max_tokens": 8}
    fields = {"controller": "class:Says", "controller_arg": "leave", "client_tools": ["leave"]}
    with server.stream("POST", "/v1/completions", json=body | fields) as stream:
        call_id, _ = told(stream.iter_lines())
        assert [call["id"] for call in waiting(server, "anna", "leave")] == [call_id]
    until(lambda: not waiting(server, "anna", "leave"), "the call is over with its stream")
    late = server.post(f"/v1/tool_results/{call_id}", json={"result": "yes"})
    assert late.status_code == 400 and "waits for an answer" in late.text


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"client_tools": ["a"], "controller": None}, "client_tools is given without a controller"),
        ({"client_tools": ["greet"]}, "client_tools has 'greet', but a tool of the server has this name"),
        ({"client_tools": ["annas.x"]}, "client_tools has 'annas.x', but a tool of the server has this name"),
        ({"client_tools": ["(client)"]}, "must be 1 to 128 printable characters"),
        ({"client_tools": ["a\n"]}, "must be 1 to 128 printable characters"),
        ({"client_tools": ["a"] * 65}, "client_tools has 65 names; at most 64"),
    ],
)
def test_client_tools_that_are_refused(server: httpx.Client, route: str, fields: dict[str, Any], why: str) -> None:
    given = {"controller": "class:Says", "controller_arg": "x"} | fields
    if given["controller"] is None:
        given = {name: value for name, value in given.items() if name == "client_tools"}
    refused = post(server, route, of_eight(route, given))
    assert refused.status_code in (400, 422) and why in refused.text  # TGI says 422


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"result": "x", "error": "y"}, "has both result and error"),
        ({"result": "x" * 2_000_000}, "no tool call"),
        ({"answer": "x"}, "answer"),
    ],
)
def test_answers_that_are_none(server: httpx.Client, body: dict[str, Any], why: str) -> None:
    refused = server.post("/v1/tool_results/nothing", json=body)
    assert refused.status_code in (400, 422) and why in refused.text
