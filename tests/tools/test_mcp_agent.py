"""An agent with two tools of the Model Context Protocol, one of them of the reference server for times."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bridle import LLM, Controller, Decision, ModelConfig
from bridle.controllers import SequenceView
from bridle.service import load_model
from bridle.tools import Call
from bridle.tools.file import make_desk

SERVER = Path(__file__).with_name("mcp_server.py")


class Agent(Controller):
    """Asks what time it is in Tokyo when it is noon in Oslo, passes the answer on to another server, and tells it."""

    def __init__(self) -> None:
        self.time: Call | None = None
        self.echo: Call | None = None

    def next(self, view: SequenceView) -> Decision:
        if view.generated:
            return Decision.stop()
        if self.time is None:
            there = {"source_timezone": "Europe/Oslo", "time": "12:00", "target_timezone": "Asia/Tokyo"}
            self.time = view.tool("time.convert_time", there, timeout=300)
        if not self.time.is_done:
            return Decision.wait_for(self.time)
        if self.echo is None:
            there = self.time.value["target"]
            self.echo = view.tool("other.echo", {"zone": there["timezone"], "at": there["datetime"]}, timeout=300)
        if not self.echo.is_done:
            return Decision.wait_for(self.echo)
        answer = self.echo.value
        return Decision.splice(0, view.encode(f" {answer['zone']} {answer['at'][11:16]}"))


@pytest.mark.slow
def test_an_agent_with_two_servers(tmp_path: Path) -> None:
    desk = make_desk(
        {
            "tools": {
                "time": {"mcp": [sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC"]},
                "other": {"mcp": [sys.executable, str(SERVER), str(tmp_path)]},
            }
        }
    )
    with LLM(load_model(ModelConfig("demo"), tools=desk)) as llm:
        text = llm.generate("In Oslo it is noon. In", controller=Agent(), max_tokens=40)[0].text
    desk.close()
    assert text in (" Asia/Tokyo 19:00", " Asia/Tokyo 20:00")  # summer in Oslo, or winter
