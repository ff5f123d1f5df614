"""Replicas whose controllers call tools, for tests of tool calls."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bridle.controller_tools import Call, ToolExecutor, ToolLimits, function_tools
from bridle.controllers import Controller, SequenceView
from bridle.controllers.plugins import make_demanded
from bridle.engine.control.decision import Decision
from tests.waiting import PATIENCE

SIZE = 32


def asks(*calls: tuple[Any, ...]) -> Any:
    return make_demanded(f"{__name__}:Asks", [list(call) for call in calls])


class Tools:
    """Tool functions that count their calls, and one that waits until the test releases it."""

    def __init__(self) -> None:
        self.num: Counter[str] = Counter()
        self.is_open, self.is_reached = threading.Event(), threading.Event()
        self.was_cancelled = threading.Event()

    def count(self, key: str) -> str:
        self.num[key] += 1
        return f"{key}{self.num[key]}"

    def waits(self, key: str) -> str:
        self.num[key] += 1
        self.is_reached.set()
        self.is_open.wait(PATIENCE)
        return f"{key}{self.num[key]}"

    async def hangs(self) -> None:
        self.is_reached.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled.set()
            raise


@pytest.fixture
def tools() -> Iterator[Tools]:
    made = Tools()
    yield made
    made.is_open.set()


def desk_of(tools: Tools, **limits: int) -> ToolExecutor:
    bounds = ToolLimits(**limits)
    functions: dict[str, Callable[..., Any]] = {"count": tools.count, "waits": tools.waits, "hangs": tools.hangs}
    return ToolExecutor(function_tools(functions, bounds), bounds)


def written(text: str) -> list[int]:
    return [ord(char) % SIZE for char in text]


class Asks(Controller):
    """A controller that calls tools one after the other, and writes each result or error."""

    def __init__(self, argument: Any) -> None:
        self.calls = [list(call) for call in argument]
        self.pending: Call | None = None

    def next(self, view: SequenceView) -> Decision:
        if self.pending is not None and self.pending.is_done:
            said = self.pending.text if self.pending.error is None else self.pending.error
            self.pending = None
            view.log(said)
            return Decision.splice(0, view.encode(said[:4]))
        if not self.calls:
            return Decision.stop("answered")
        name, arguments, *timeout = self.calls.pop(0)
        self.pending = view.tool(name, arguments, *timeout)
        return Decision.wait_for(self.pending)
