"""Controllers of an operator's call the operator's tools, on every route: each user those that are meant for him."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bridle import Controller, Decision
from bridle.controllers import SequenceView
from bridle.http import HttpSettings
from bridle.service.keys import KeyStore
from bridle.tools import Call, ToolDesk, function_tools
from bridle.tools.access import Grant
from tests.http.harness import scripted_model, served
from tests.http.test_borrowed_fields import of_eight, text_of
from tests.http.test_fields import ROUTES, post

KEYS: dict[str, str] = {}


class Says(Controller):
    """Writes what a tool answers, or why it does not."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.call: Call | None = None

    def next(self, view: SequenceView) -> Decision:
        if view.generated:
            return Decision.stop()
        if self.call is None:
            self.call = view.tool(self.name)
        if not self.call.is_done:
            return Decision.wait_for(self.call)
        return Decision.splice(0, view.encode("refused" if self.call.error else self.call.text))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    keys = KeyStore(Path(tmp_path_factory.mktemp("keys")) / "keys.db")
    for user in ("anna", "otto"):
        KEYS[user] = keys.add(user)
    tools = function_tools({"greet": lambda: "hi", "annas": lambda: "hi anna"})
    desk = ToolDesk(tools, grants={"annas": Grant(users=frozenset({"anna"}))})
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
