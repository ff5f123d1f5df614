"""Tests of server tools in a chat: the model is offered them, calls are shown, and the user allows or refuses calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bridle.controller_tools import ToolExecutor, function_tools
from tests.http.browser import opened
from tests.http.harness import saying, scripted_model, served
from tests.http.playground_kit import BROKEN, MARKS, answer_of
from tests.http.tool_calls import HERMES, a_tokenizer

pytestmark = MARKS

CALL = '<tool_call>\n{"name": "town__weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def calling() -> Callable[[Any], int]:
    """Return a script of a model that calls a tool, and writes a text after the tool's result."""
    text = a_tokenizer(HERMES)
    call, advice = saying(CALL, text), saying("Take a hat.", text)

    def next_token(prefix: Any) -> int:
        prompt = text.decode(list(prefix))
        is_over = "sunny" in prompt or "refused" in prompt
        return (advice if is_over else call)(prefix)

    return next_token


@pytest.fixture(scope="module")
def tools_url() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []

    def weather(city: str) -> str:
        """Return the weather of a city."""
        asked.append(city)
        return "sunny"

    desk = ToolExecutor(function_tools({"town.weather": weather}), direct=("town.weather",))
    model = scripted_model(next_token=calling(), text=a_tokenizer(HERMES), tools=desk, max_model_len=4096)
    with served(model) as url:
        yield url, asked
    desk.close()


@pytest.fixture
def chat(browser: Any, tools_url: tuple[str, list[str]]) -> Iterator[Any]:
    with opened(browser, tools_url[0]) as page:
        page.get_by_role("button", name="Tools").click()
        page.get_by_label("town.weather").check()
        page.get_by_role("button", name="Tools · 1").wait_for()
        yield page


def say(page: Any) -> None:
    page.get_by_label("Message").fill("Do I need a hat?")
    page.keyboard.press("Enter")


def test_a_call_waits_for_the_reader_and_its_result_goes_to_the_model(
    chat: Any, tools_url: tuple[str, list[str]], axe: str, tmp_path: Path
) -> None:
    say(chat)
    call = chat.get_by_role("list", name="Calls of tools")
    call.get_by_text("waits for you").wait_for()
    assert "town.weather" in call.inner_text() and tools_url[1] == []
    assert json.loads(call.get_by_label("Arguments").inner_text()) == {"city": "Oslo"}
    chat.evaluate(axe)
    assert chat.evaluate(BROKEN) == []
    with chat.expect_request("**/v1/chat/completions") as asked:
        call.get_by_role("button", name="Run").click()
    *_, called, told = asked.value.post_data_json["messages"]
    assert told == {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "sunny"}
    chat.locator(".markdown").get_by_text("Take a hat.").wait_for()
    assert tools_url[1] == ["Oslo"] and answer_of(chat) == "Take a hat."
    call.get_by_text("Result").click()
    call.get_by_text("sunny").wait_for()
    chat.reload()
    open_talk(chat)
    call.get_by_text("done").wait_for()
    chat.get_by_role("button", name="Actions for Do I need a hat?").click()
    with chat.expect_download() as saved:
        chat.locator(".menu-list").get_by_role("button", name="Export").click()
    path = tmp_path / "talk.json"
    saved.value.save_as(path)
    chat.get_by_role("button", name="New conversation").click()
    chat.get_by_label("Trace file").set_input_files(path)
    call.get_by_text("done").wait_for()
    assert answer_of(chat) == "Take a hat."


def open_talk(page: Any) -> None:
    page.get_by_label("History").get_by_role("button", name="Do I need a hat?", exact=True).click()


def test_a_refused_call_is_told_to_the_model(chat: Any, tools_url: tuple[str, list[str]]) -> None:
    before = list(tools_url[1])
    say(chat)
    with chat.expect_request(lambda asked: "refused" in (asked.post_data or "")) as asked:
        chat.get_by_role("button", name="Refuse").click()
    assert asked.value.post_data_json["messages"][-1]["content"] == "Error: The user refused this call."
    chat.locator(".markdown").get_by_text("Take a hat.").wait_for()
    assert tools_url[1] == before
    chat.get_by_text("no result").wait_for()


def test_calls_run_without_a_question_if_the_reader_wants_that(chat: Any, tools_url: tuple[str, list[str]]) -> None:
    before = len(tools_url[1])
    chat.get_by_label("ask before each call").uncheck()
    say(chat)
    chat.locator(".markdown").get_by_text("Take a hat.").wait_for()
    assert len(tools_url[1]) == before + 1 and chat.get_by_role("button", name="Run", exact=True).count() == 0


def test_a_server_without_such_tools_offers_none(page: Any) -> None:
    page.get_by_role("button", name="Rules").wait_for()
    assert page.get_by_role("button", name="Tools", exact=True).count() == 0
