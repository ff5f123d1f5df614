"""An agent with two tools of the Model Context Protocol, one of them of the reference server for times."""

from __future__ import annotations

import re
import sys
from contextlib import closing
from pathlib import Path

import pytest

from bridle import LLM, Controller, Decision, ModelConfig, SamplingParams, WasmController
from bridle.controller_tools import Call
from bridle.controller_tools.config import make_desk
from bridle.controllers import SequenceView, standard
from bridle.serving import ControlSettings, load_model
from tests.controllers.example_tools import example_tools
from tests.sources import ROOT

SERVER = Path(__file__).with_name("mcp_server.py")


class Agent(Controller):
    """Asks for the time in Tokyo when it is noon in Oslo, passes the answer on to another server, and writes it."""

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


@pytest.mark.slow
@pytest.mark.parametrize("language", ["js", "py"])
def test_the_examples_with_the_reference_server(language: str, request: pytest.FixtureRequest) -> None:
    """The file `examples/tools.toml` and the agents beside it run unchanged."""
    limits = ("max_prepare_wait=800000", "max_init_time=10000")
    args = ("--wasm-max-step-time=2000", *(word for limit in limits for word in ("--limit", limit)))
    control = ControlSettings("on", args=args, store=request.config.cache.mkdir("bridle-py-store"))
    desk = example_tools(None)
    with closing(desk), LLM(load_model(ModelConfig("demo"), control=control, tools=desk)) as llm:
        module = llm.upload(standard.load("jsctrl")) if language == "js" else "pyctrl"
        script = (ROOT / "examples" / f"agent.{language}").read_text(encoding="utf-8")
        sampling = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
        (output,) = llm.generate("", sampling, controller=WasmController(module, script))
        assert desk.counts()["town"].num_calls == desk.counts()["time"].num_calls == 1
    assert re.search(r'</tool_call>\{"time": ?"\d\d:\d\d"\}It is', output.text)
    assert output.storage["answer"].startswith(b"It is") and output.usage.rewound_tokens == 0
