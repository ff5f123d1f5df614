"""Tests of scripts and programs in the sandbox that call tools through variables, in which the engine stores the
answers."""

from __future__ import annotations

import asyncio
import json
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bridle.aici.client import RuntimePool
from bridle.controller_tools import CALL_VARIABLE, ClientTool, ToolExecutor, ToolLimits, function_tools
from bridle.controllers import standard
from bridle.outputs import FinishReason, Stored
from tests.controllers.conftest import Run, runner
from tests.controllers.pykit import Scripts
from tests.waiting import PATIENCE, until


def raises() -> str:
    raise ValueError("no such city")


async def hangs() -> str:
    await asyncio.Event().wait()
    return ""


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "echo": lambda text: text,
    "raises": raises,
    "hangs": hangs,
    "huge": lambda: "x" * 10_000,
}


@pytest.fixture(scope="module")
def desk(script_pool: RuntimePool) -> Iterator[ToolExecutor]:
    limits = ToolLimits(max_result_bytes=1_000)
    made, before = ToolExecutor(function_tools(FUNCTIONS, limits), limits), script_pool.tools.desk
    script_pool.tools.desk = made
    yield made
    script_pool.tools.desk = before
    made.close()


def test_javascript_writes_what_a_tool_answers(js: Run, desk: ToolExecutor) -> None:
    ran = js(
        """
        const sum = tool("add", { a: 20, b: 22 })
        await $`The sum is `
        await $`${await sum.json()}`
        await gen({ maxTokens: 3 })
        """,
        "The sum is 42 of course",
    )
    assert ran.text() == "The sum is 42 of"
    assert ran.end("a").usage.sampled_tokens == 3
    assert not [event for event in ran.events["a"] if isinstance(event, Stored)]  # clients see no such variables


def test_javascript_calls_several_at_once(js: Run, desk: ToolExecutor) -> None:
    ran = js(
        """
        const calls = ["a", "b", "c"].map((text) => tool("echo", { text }))
        for (const call of calls) await $`${await call.text()} ${call.isDone};`
        """
    )
    assert ran.text() == "a true;b true;c true;"


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ('tool("raises")', "tool \"raises\": raised ValueError('no such city')"),
        ('tool("absent")', 'tool "absent": unknown tool; available tools: add, echo, raises, hangs, huge'),
        ('tool("hangs", {}, { timeout: 10 })', 'tool "hangs": the tool did not answer within 0.01 seconds'),
        ('tool("huge")', 'tool "huge": the answer has more than 1000 bytes (max_result_bytes)'),
    ],
)
def test_javascript_is_told_of_faults(js: Run, desk: ToolExecutor, call: str, why: str) -> None:
    ran = js(f"try {{ await ({call}).text() }} catch (error) {{ console.log(`${{error.name}}: ${{error.message}}`) }}")
    assert f"ToolError: {why}" in ran.logs("a")
    assert ran.end("a").reason is FinishReason.CONTROLLER


def test_a_call_that_is_given_up_is_cancelled(js: Run, desk: ToolExecutor) -> None:
    ran = js(
        """
        const call = tool("hangs")
        await $`x`
        call.cancel()
        try { await call.text() } catch (error) { console.log(error.message) }
        """
    )
    assert 'tool "hangs": was cancelled' in ran.logs("a")
    until(lambda: not desk.counts()["hangs"].num_running)


def test_forks_call_for_themselves_and_share_variables(js: Run, desk: ToolExecutor) -> None:
    ran = js(
        """
        const shared = tool("echo", { text: "both" })
        const number = await fork(2)
        const own = tool("echo", { text: `own${number}` })
        await $`${await own.text()} ${await shared.text()}`
        """
    )
    assert sorted(ran.text("a", index) for index in (0, 1)) == ["own0 both", "own1 both"]


def test_a_guest_that_waits_is_not_asked_and_not_given_up(script_pool: RuntimePool, desk: ToolExecutor) -> None:
    """A script that waits for a tool is not called, and its wait counts neither as a deadlock nor as idle steps of
    others."""
    gate = threading.Event()
    module = Scripts(script_pool, "").upload(standard.load("jsctrl"))
    slow = ToolExecutor(function_tools({"slow": lambda: gate.wait(PATIENCE) and "at last"}))
    before, script_pool.tools.desk = script_pool.tools.desk, slow
    try:
        scripts = Scripts(script_pool, module, max_noops=5, max_idle_steps=50)
        scripts.add_module("a", module, 'await $`${await tool("slow").text()}`', max_tokens=50, prompt=(1, 2))
        scripts.run(lambda: bool(script_pool.held))
        for _ in range(200):
            scripts.step()
        assert not scripts.is_over("a")
        assert scripts.engine.is_parked
        gate.set()
        scripts.run()
        assert scripts.text("a") == "at last"
    finally:
        gate.set()
        script_pool.tools.desk = before
        slow.close()


def test_what_is_cancelled_ends_its_calls(script_pool: RuntimePool, desk: ToolExecutor) -> None:
    module = Scripts(script_pool, "").upload(standard.load("jsctrl"))
    scripts = Scripts(script_pool, module)
    scripts.add_module("a", module, 'await tool("hangs").text()', max_tokens=50, prompt=(1, 2))
    scripts.run(lambda: bool(script_pool.held))
    assert desk.counts()["hangs"].num_running
    (request_id,) = scripts.engine.request_ids
    scripts.engine.cancel(request_id)
    scripts.run()
    until(lambda: not desk.counts()["hangs"].num_running)
    assert not script_pool.held


def test_json_programs_call_tools_with_variables(script_pool: RuntimePool, desk: ToolExecutor) -> None:
    call = json.dumps({"name": "add", "arguments": {"a": 1, "b": 2}})
    steps: list[dict[str, Any]] = [
        {
            "Fixed": {
                "text": {"String": {"str": "1 + 2 = "}},
                "stmts": [{"Set": {"var": "tool:sum", "expr": {"String": {"str": call}}}}],
            }
        },
        {"Wait": {"vars": ["tool:sum:answer"]}},
        {"Fixed": {"text": {"Var": {"var": "tool:sum:answer"}}}},
    ]
    ran = runner(script_pool, "declctrl")(json.dumps({"steps": steps}))
    assert (ran.text(), ran.error()) == ("1 + 2 = 3", "")


def test_a_script_asks_the_client(script_pool: RuntimePool, desk: ToolExecutor) -> None:
    module = Scripts(script_pool, "").upload(standard.load("jsctrl"))
    asking, before = ToolExecutor({"ask": ClientTool("Asks somebody.")}), script_pool.tools.desk
    script_pool.tools.desk = asking
    try:
        scripts = Scripts(script_pool, module)
        source = 'await $`${await tool("ask", { what: "name" }).text()}`'
        scripts.add_module("a", module, source, max_tokens=50, prompt=(1, 2))
        scripts.run(lambda: bool(script_pool.held))
        (told,) = (event for event in scripts.events["a"] if isinstance(event, Stored))
        assert json.loads(told.value) == {"name": "ask", "arguments": {"what": "name"}}
        asking.answer(told.name.removeprefix(CALL_VARIABLE), "", "Ann")
        scripts.run()
        assert scripts.text("a") == "Ann"
    finally:
        script_pool.tools.desk = before
        asking.close()


def test_a_script_makes_more_calls_than_it_may_have_variables(js: Run, desk: ToolExecutor) -> None:
    """A variable whose answer was read is freed, so only the number of tool calls is limited."""
    before = desk.counts()["add"].num_calls
    ran = js(
        """
        let sum = 0
        for (let i = 0; i < 150; i++) sum = await tool("add", { a: sum, b: i }).json()
        await $`${sum}`
        """
    )
    assert (ran.text(), ran.error()) == (str(sum(range(150))), "")
    assert desk.counts()["add"].num_calls - before == 150


def test_a_hundred_thousand_calls_end_their_own_request(js: Run, desk: ToolExecutor) -> None:
    ran = js("for (let i = 0; i < 100_000; i++) tool('hangs')\nawait $`x`")
    assert "limit" in ran.error() or "at most" in ran.error() or "more than" in ran.error(), ran.error()
    until(lambda: not desk.counts()["hangs"].num_running)
    assert js("await $`${await tool('echo', { text: 'alive' }).text()}`").text() == "alive"


def test_a_call_that_is_made_again_gives_the_first_up(js: Run, desk: ToolExecutor) -> None:
    """A tool call that is replaced by another in the same variable is cancelled, since no one could read its answer."""
    ran = js(
        """
        import { setVar, getVar } from "aici"
        setVar("tool:x", JSON.stringify({ name: "hangs", timeout: 300 }))
        await $`a`
        setVar("tool:x", JSON.stringify({ name: "echo", arguments: { text: "b" } }))
        await waitVars("tool:x:answer")
        await $`${getVar("tool:x:answer").decode()}`
        """
    )
    assert (ran.text(), ran.error()) == ("ab", "")
    until(lambda: not desk.counts()["hangs"].num_running)


def test_a_call_that_is_nested_deeply_is_malformed(js: Run, desk: ToolExecutor) -> None:
    """A tool call with 9,000 nested lists is refused; parsing it must not crash the engine's thread."""
    ran = js(
        """
        import { setVar, getVar } from "aici"
        setVar("tool:x", '{"name": "echo", "arguments": {"text": ' + "[".repeat(9000) + "]".repeat(9000) + "}}")
        await waitVars("tool:x:answer")
        console.log(getVar("tool:x:error").decode())
        """
    )
    assert "malformed call: maximum recursion depth exceeded" in ran.logs("a"), ran.error()


def test_malformed_calls_are_told(js: Run, desk: ToolExecutor) -> None:
    ran = js(
        """
        import { setVar, getVar } from "aici"
        setVar("tool:x", "no JSON")
        await waitVars("tool:x:answer")
        console.log(getVar("tool:x:error").decode())
        """
    )
    assert "malformed call: JSON is malformed" in ran.logs("a")


def test_python_writes_what_a_tool_answers(py_pool: RuntimePool, py: Run) -> None:
    desk, before = ToolExecutor(function_tools(FUNCTIONS)), py_pool.tools.desk
    py_pool.tools.desk = desk
    try:
        ran = py(
            textwrap.dedent(
                """
                import pyaici.server as aici

                async def main():
                    first, second = aici.tool("add", {"a": 20, "b": 22}), aici.tool("raises")
                    await aici.FixedTokens(f"It is {await first.json()}")
                    try:
                        await second.text()
                    except aici.ToolError as error:
                        print(f"{error}; {second.is_done}")

                aici.start(main())
                """
            )
        )
    finally:
        py_pool.tools.desk = before
        desk.close()
    assert ran.text() == "It is 42"
    assert "tool 'raises': raised ValueError('no such city'); True" in ran.logs("a")
