"""Servers of the Model Context Protocol as tools: their answers, and every way in which a server can fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bridle.controller_tools import Call, ToolExecutor, ToolLimits
from bridle.controller_tools.mcp import McpServer, McpTool
from bridle.errors import InvalidRequest
from tests.waiting import PATIENCE, until

SERVER = Path(__file__).with_name("mcp_server.py")


class Lab:
    """A tool executor with one MCP server, and the number of the server's starts."""

    def __init__(self, folder: Path, *more: str, only: frozenset[str] | None = None, pause: float = 0.0) -> None:
        self.folder = folder
        command = (sys.executable, "-I", "-S", str(SERVER), str(folder), *more)
        self.tool = McpTool("it", McpServer(command, tools=only, max_bytes=100_000), pause)
        limits = ToolLimits(timeout=PATIENCE, max_timeout=PATIENCE, max_result_bytes=100_000)
        self.desk = ToolExecutor({"it": self.tool}, limits)

    @property
    def num_starts(self) -> int:
        return len(list(self.folder.iterdir()))

    def processes(self) -> list[psutil.Process]:
        """The server processes that run now."""
        children = psutil.Process().children()
        return [child for child in children if str(self.folder) in child.cmdline()]

    def begin(self, name: str, timeout: float | None = None, **arguments: object) -> Call:
        return self.desk.begin(name, arguments, timeout)

    def ask(self, name: str, timeout: float | None = None, **arguments: object) -> Call:
        call = self.begin(name, timeout, **arguments)
        until(lambda: call.is_done)
        return call


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    yield made
    made.desk.close()


def test_a_server_answers_many_calls_in_one_life(lab: Lab) -> None:
    assert json.loads(lab.ask("it.echo", word="grün").text) == {"word": "grün"}
    assert lab.ask("it.structured").value == {"degrees": 3.5}
    assert lab.ask("it.mixed").text == "one\ntwo"
    assert lab.ask("it.fails").error == "no such city"
    assert lab.ask("it").error == "this name is an MCP server; call one of its tools as it.TOOL"
    assert lab.ask("it.absent").error == (
        "server it has no tool 'absent'; "
        "its tools are echo, slow, dies, huge, broken, fails, structured, mixed, get_current_time"
    )
    assert lab.ask("it.broken").text == "after the broken line"  # a line that is no message is passed over
    assert lab.num_starts == 1


def test_a_server_that_dies_is_started_again(lab: Lab) -> None:
    """Pending calls fail when the server dies, and the next call starts a new server."""
    waiting = lab.begin("it.echo")
    until(lambda: waiting.is_done)
    died = lab.ask("it.dies")
    assert died.error == "server it ended during the call: its process ended with code 7"
    assert lab.ask("it.echo").text == "{}"
    assert lab.num_starts == 2


def test_an_answer_of_100_mb_ends_the_server_unread(lab: Lab) -> None:
    huge = lab.ask("it.huge")
    why = "it sent a message of more than 165536 bytes (max_result_bytes)"
    assert huge.error == f"server it ended during the call: {why}"
    assert lab.ask("it.echo").text == "{}"
    assert lab.num_starts == 2
    lab.desk.close()
    assert not lab.processes()  # the first has not ended when the second is asked


def test_a_server_that_hangs_fails_its_calls_in_time(lab: Lab) -> None:
    assert lab.ask("it.echo").text == "{}"
    assert lab.ask("it.slow", 0.05).error == "the tool did not answer within 0.05 seconds"
    late = lab.begin("it.slow")
    late.cancel()
    until(lambda: not lab.desk.counts()["it"].num_running)
    assert late.error == "was cancelled"


def test_a_server_that_does_not_start_is_not_started_again_at_once(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "no licence", pause=PATIENCE)
    try:
        first = lab.ask("it.echo")
        assert first.error == "it did not start: its process ended with code 1"
        again = lab.ask("it.echo")
        assert again.error == f"server it failed to start a moment ago: {first.error}"
        assert lab.num_starts == 1
    finally:
        lab.desk.close()


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    desk = ToolExecutor({"it": McpTool("it", McpServer((str(tmp_path / "absent"),)))})
    call = desk.begin("it.x")
    until(lambda: call.is_done)
    desk.close()
    assert call.error is not None and call.error.startswith("it did not start: [Errno 2] No such file")


def test_an_operator_offers_some_of_a_servers_tools(tmp_path: Path) -> None:
    lab = Lab(tmp_path, only=frozenset({"echo"}))
    try:
        assert lab.ask("it.fails").error == "server it has no tool 'fails'; its tools are echo"
        assert lab.ask("it.echo").text == "{}"
    finally:
        lab.desk.close()


def test_calls_that_come_together_share_one_start(lab: Lab) -> None:
    calls = [lab.begin("it.echo", number=number) for number in range(8)]
    until(lambda: all(call.is_done for call in calls))
    assert [call.value for call in calls] == [{"number": number} for number in range(8)]
    assert lab.num_starts == 1


def test_a_server_ends_with_the_desk(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    pending = lab.begin("it.slow")
    until(lambda: lab.tool.life is not None and lab.tool.life.ready.done())
    life = lab.tool.life
    lab.desk.close()
    assert life is not None and life.is_over
    assert pending.error == "tools were shut down"


def test_a_server_has_a_command_or_a_url() -> None:
    for wrong in ({}, {"command": ("x",), "url": "http://x/"}):
        with pytest.raises(InvalidRequest, match="needs either a command or a url"):
            McpServer(**wrong)  # type: ignore[arg-type]
