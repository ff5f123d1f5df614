"""An operator's file of tools: its content, and the errors for mistakes in it."""

from __future__ import annotations

import logging
import textwrap
from pathlib import Path
from typing import Any

import pytest

from bridle.cli.control_options import ToolOptions
from bridle.controller_tools import ToolExecutor
from bridle.controller_tools.config import make_desk, read_tools
from bridle.errors import InvalidRequest
from bridle.http import ServeSettings
from tests.waiting import until

FILE = """
log = "content"

[limits]
timeout = 5
max_calls = 3

[tools.add]
python = "mine.py:add"

[tools.admin]
python = "mine.py:add"
roles = ["admin"]

[tools.annas]
python = "mine.py:add"
users = ["anna"]

[tools.both]
python = "mine.py:add"
users = ["anna"]
roles = ["admin"]

[tools.wiki]
http = ["GET https://en.wikipedia.org/api/rest_v1/"]
max_bytes = 10000
timeout = 2.5
private = ["10.0.0.0/8"]
headers = { Authorization = "Bearer x" }

[tools.time]
mcp = ["mcp-server-time"]
env = { TZ = "UTC" }
only = ["get_current_time"]

[tools.remote]
mcp = "https://mcp.example.org/"
headers = { Authorization = "Bearer x" }
"""


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"http": ["GET https://example.org/"], "direct": "yes"}, "tools.it: direct is 'yes'; must be true or false"),
        ({"client": "Asks.", "direct": True}, "tools.it: direct is true, but the client answers this tool"),
    ],
)
def test_direct_is_for_tools_that_the_server_runs(table: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        make_desk({"tools": {"it": table}})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text("def add(a, b):\n    'The sum.'\n    return a + b\n", encoding="utf-8")
    path = tmp_path / "tools.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


def test_a_file_of_every_kind(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    desk = read_tools(file)
    assert desk.names == ("add", "admin", "annas", "both", "wiki", "time", "remote")
    assert (desk.limits.timeout, desk.limits.max_calls) == (5, 3)
    assert desk.describe("add") == "The sum."
    assert desk.describe("wiki") == "HTTP: GET https://en.wikipedia.org/api/rest_v1/"
    assert desk.describe("time") == "MCP: mcp-server-time"
    with caplog.at_level(logging.INFO, "bridle.controller_tools"):
        call = desk.begin("add", {"a": 1, "b": 2})
        until(lambda: not desk.counts()["add"].num_running)
    assert call.value == 3
    assert "got the arguments {'a': 1, 'b': 2} and answered '3'" in caplog.text
    desk.close()


def test_who_may_use_what(file: Path) -> None:
    desk = read_tools(file)
    everybody = ("wiki", "time", "remote")
    assert desk.names_for("otto", False) == ("add", *everybody)
    assert desk.names_for("anna", False) == ("add", "annas", "both", *everybody)
    assert desk.names_for("otto", True) == ("add", "admin", "both", *everybody)
    desk.close()


def test_nothing_of_a_call_is_logged_unless_wanted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        desk = make_desk({"tools": {"len": {"python": "builtins:len"}}})
        call = desk.begin("len", {"secret": 1})
        until(lambda: not desk.counts()["len"].num_running)
        desk.close()
    assert call.error is not None
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"tool": {}}, "tools has a field 'tool'; known are tools, limits, log"),
        ({"log": "all"}, "tools: log is 'all'; must be one of none, calls, content"),
        ({"limits": {"time": 1}}, "limits has a field 'time'; known are timeout, max_timeout"),
        ({"limits": {"timeout": -1}}, "tools: limits: timeout is -1; must be a number above 0"),
        ({"tools": []}, "tools is []; must be a table"),
        ({"tools": {"x": 3}}, "tools.x is 3; must be a table"),
        ({"tools": {"x": {}}}, "tools.x must have one of python, http, mcp, client; it has none"),
        ({"tools": {"x": {"python": "a:b", "mcp": []}}}, "it has python and mcp"),
        (
            {"tools": {"x": {"python": "a:b", "timeout": 3}}},
            "tools.x has a field 'timeout'; known are python, users, roles",
        ),
        ({"tools": {"x": {"python": "nothing"}}}, "tools.x: python is 'nothing'; must be MODULE:FUNCTION"),
        ({"tools": {"x": {"python": "absent.py:f"}}}, "tools.x: python: "),
        ({"tools": {"x": {"python": "math:absent"}}}, "the module has no 'absent'"),
        ({"tools": {"x": {"python": "math:pi"}}}, "'x' is 3.14159"),
        ({"tools": {"x": {"python": "math:floor", "roles": ["boss"]}}}, "each role must be one of admin, user"),
        ({"tools": {"x": {"python": "math:floor", "users": []}}}, "users is empty, so the tool cannot be used"),
        ({"tools": {"x": {"python": "math:floor", "users": "ann"}}}, "users is 'ann'; must be a list of texts"),
        ({"tools": {"x": {"http": []}}}, "http is empty"),
        ({"tools": {"x": {"http": ["https://a/"]}}}, "tools.x: allow has the entry 'https://a/': "),
        ({"tools": {"x": {"http": ["GET https://a/"], "max_bytes": 1.5}}}, "max_bytes is 1.5; must be a whole number"),
        ({"tools": {"x": {"http": ["GET https://a/"], "private": ["x"]}}}, "private: 'x' does not appear to be"),
        ({"tools": {"x": {"http": ["GET https://a/"], "headers": {"A": "b\r\n"}}}}, "its values must be texts"),
        ({"tools": {"x": {"mcp": "mcp-server-time"}}}, "must be a URL, or a command as a list"),
        ({"tools": {"x": {"mcp": "http://a/", "env": {}}}}, "env is only for an MCP server that a command starts"),
        ({"tools": {"x": {"mcp": ["a"], "headers": {}}}}, "headers are only for an MCP server with a URL"),
        ({"tools": {"x": {"mcp": []}}}, "needs either a command or a url"),
        ({"tools": {"x" * 200: {"python": "math:floor"}}}, "must have 1 to 128 printable characters"),
    ],
)
def test_what_is_wrong_is_told(content: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_desk(content)
    assert why in str(caught.value)
    assert caught.value.param == "tools"


def test_files_that_are_none(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[tools", encoding="utf-8")
    with pytest.raises(InvalidRequest, match=r"tools: broken\.toml is not valid TOML: "):
        read_tools(broken)
    with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
        read_tools(tmp_path / "absent.toml")
    broken.write_text("#" * (1 << 20) + "\n", encoding="utf-8")
    with pytest.raises(InvalidRequest, match="has more than 1048576 bytes"):
        read_tools(broken)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        InvalidRequest, match=r"tools.x: the package mcp is not installed; pip install 'bridle-llm\[tools\]'"
    ):
        make_desk({"tools": {"x": {"mcp": ["x"]}}})


def test_the_flag_loads_the_tools_of_a_file(file: Path) -> None:
    settings = ToolOptions(tools=file).add_to(ServeSettings())
    assert isinstance(settings.tools, ToolExecutor)
    assert settings.make_loader(settings.engine, settings.control)._tools is settings.tools  # type: ignore[attr-defined]
    settings.tools.close()
    assert ToolOptions().add_to(ServeSettings()).tools is None


def test_a_function_without_a_file_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.py").write_text(textwrap.dedent("async def now():\n    return 'noon'\n"), encoding="utf-8")
    desk = make_desk({"tools": {"now": {"python": "other.py:now"}}}, tmp_path)
    call = desk.begin("now")
    until(lambda: call.is_done)
    desk.close()
    assert call.text == "noon"
