"""Users list and call the server's tools directly, if the operator allows it. Grants and limits are the same as for
calls of controllers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.controller_tools import ClientTool, ToolExecutor, ToolLimits, function_tools
from bridle.controller_tools.access import ToolPermission
from bridle.controller_tools.config import make_desk
from bridle.serving.tenancy.keys import KeyStore
from tests.http.harness import scripted_model, served
from tests.waiting import until

MCP = Path(__file__).parent.parent / "controller_tools/mcp_server.py"
KEYS: dict[str, str] = {}


def weather(city: str, days: int = 1) -> str:
    """A tool that returns the weather of a city."""
    return f"{city}: sunny for {days}"


def fails() -> str:
    raise RuntimeError("no such thing")


async def slow() -> None:
    await asyncio.sleep(3600)


@pytest.fixture(scope="module")
def desk() -> Iterator[ToolExecutor]:
    functions = {"weather": weather, "fails": fails, "slow": slow, "annas": lambda: "hi", "hidden": lambda: "secret"}
    tools = function_tools(functions) | {"ask": ClientTool("Asks the person.")}
    grants = {"annas": ToolPermission(users=frozenset({"anna"}))}
    limits = ToolLimits(max_argument_bytes=100)
    made = ToolExecutor(tools, limits, grants, direct=("weather", "fails", "slow", "annas", "ask"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(desk: ToolExecutor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    keys = KeyStore(tmp_path_factory.mktemp("keys") / "keys.db")
    for user in ("anna", "otto"):
        KEYS[user] = keys.add(user)
    with served(scripted_model(tools=desk), keys=keys) as url, httpx.Client(base_url=url, timeout=600) as client:
        yield client
    keys.close()


def of(user: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[user]}"}


def call(server: httpx.Client, name: str, user: str = "anna", **arguments: Any) -> dict[str, str]:
    answer = server.post("/v1/tools/call", json={"name": name, "arguments": arguments}, headers=of(user))
    answer.raise_for_status()
    found: dict[str, str] = answer.json()
    return found


def test_each_user_sees_the_tools_to_call_with_their_schemas(server: httpx.Client) -> None:
    rows = {
        user: {row["name"]: row for row in server.get("/v1/tools", headers=of(user)).json()["data"]}
        for user in ("anna", "otto")
    }
    assert set(rows["anna"]) == {"weather", "fails", "slow", "annas"}
    assert set(rows["otto"]) == {"weather", "fails", "slow"}
    assert rows["otto"]["weather"] == {
        "name": "weather",
        "description": "A tool that returns the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }


def test_a_call_answers_or_says_why_not(server: httpx.Client) -> None:
    assert call(server, "weather", city="Oslo", days=2) == {"result": "Oslo: sunny for 2"}
    assert "the arguments do not fit" in call(server, "weather", town="Oslo")["error"]
    assert "no such thing" in call(server, "fails")["error"]
    assert "at most 100 (max_argument_bytes)" in call(server, "weather", city="x" * 200)["error"]
    wrong = server.post("/v1/tools/call", json={"name": "", "arguments": []}, headers=of("anna"))
    assert wrong.status_code == 400 and "name" in wrong.text


@pytest.mark.parametrize(("name", "user"), [("hidden", "anna"), ("annas", "otto"), ("ask", "anna")])
def test_tools_that_are_not_for_a_user_are_unknown(server: httpx.Client, name: str, user: str) -> None:
    error = call(server, name, user)["error"]
    assert f"there is no tool {name!r} that you may call; there are " in error
    known = error.partition("there are ")[2].split(", ")
    assert set(known) == {"weather", "fails", "slow"} | ({"annas"} if user == "anna" else set())


def test_a_call_ends_with_its_client(server: httpx.Client, desk: ToolExecutor) -> None:
    with pytest.raises(httpx.ReadTimeout):
        server.post("/v1/tools/call", json={"name": "slow"}, headers=of("anna"), timeout=httpx.Timeout(600, read=2))
    until(lambda: desk.counts()["slow"].num_failed == 1)
    assert desk.counts()["slow"].num_running == 0


def test_tools_of_mcp_servers_are_listed_and_called(tmp_path: Path) -> None:
    """If an MCP server does not start, its reason is reported and the other servers stay usable."""
    command = [sys.executable, "-I", "-S", str(MCP), str(tmp_path)]
    tables = {
        "other": {"mcp": command, "only": ["echo", "fails"], "direct": True},
        "dead": {"mcp": [*command, "it is broken"], "direct": True},
        "quiet": {"mcp": command},
    }
    desk = make_desk({"tools": tables})
    with served(scripted_model(tools=desk)) as url, httpx.Client(base_url=url, timeout=600) as client:
        rows = {row["name"]: row for row in client.get("/v1/tools").json()["data"]}
        assert set(rows) == {"other.echo", "other.fails", "dead"}
        assert rows["other.echo"]["parameters"] == {"type": "object"}
        assert "dead did not start" in rows["dead"]["error"]
        body = {"name": "other.echo", "arguments": {"word": "yes"}}
        assert client.post("/v1/tools/call", json=body).json() == {"result": '{"word": "yes"}'}
        hidden = client.post("/v1/tools/call", json={"name": "other.slow"}).json()
        assert hidden["error"].startswith("server other has no tool")
    desk.close()
