"""Tests of data that the playground stores: chats in several tabs, interrupted answers, unsent messages, and undo."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http.browser import opened
from tests.http.harness import saying, scripted_model, served, tokenizer
from tests.http.playground_kit import MARKS, answer_of, ask, complete, go, show_tokens, text_of, until_kept
from tests.waiting import PATIENCE

pytestmark = MARKS

SAID = "Good day to you."


@pytest.fixture(scope="module")
def talking_url() -> Iterator[str]:
    with served(scripted_model(next_token=saying(SAID))) as made:
        yield made


@pytest.fixture
def chat(browser: Any, talking_url: str) -> Iterator[Any]:
    with opened(browser, talking_url) as made:
        yield made


def messages(page: Any) -> list[str]:
    found: list[str] = page.locator(".message.user .said-text").all_inner_texts()
    return found


def open_talk(page: Any, title: str) -> None:
    page.get_by_label("History").get_by_role("button", name=title, exact=True).click()


def act(page: Any, title: str, name: str) -> None:
    page.get_by_role("button", name=f"Actions for {title}").click()
    page.locator(".menu-list").get_by_role("button", name=name, exact=True).click()


def test_two_tabs_add_to_one_conversation(chat: Any, talking_url: str) -> None:
    ask(chat, "first")
    other = chat.context.new_page()
    other.set_default_timeout(1000 * PATIENCE)
    other.goto(talking_url)
    open_talk(other, "first")
    ask(chat, "second")
    other.locator(".message.user .said-text").get_by_text("second").wait_for()
    ask(other, "third")
    chat.locator(".message.user .said-text").get_by_text("third").wait_for()
    chat.reload()
    open_talk(chat, "first")
    chat.locator(".message.user .said-text").get_by_text("third").wait_for()
    assert messages(chat) == ["first", "second", "third"]


def test_a_reload_keeps_what_was_written_and_the_answer_continues(browser: Any) -> None:
    may_go = threading.Event()
    word, eos = tokenizer().encode("x", add_special_tokens=False)[0], tokenizer().eos_token_ids[0]

    def next_token(prefix: Any) -> int:
        may_go.wait(0.2)  # leaves time to read what was written
        return eos if may_go.is_set() and list(prefix).count(word) >= 30 else word

    with served(scripted_model(next_token=next_token)) as url, opened(browser, url) as page:
        page.get_by_label("Message").fill("Hello")
        page.keyboard.press("Enter")
        page.locator(".message.assistant .markdown").get_by_text(re.compile("^xxx")).wait_for()
        page.reload()
        open_talk(page, "Hello")
        before = answer_of(page)
        assert set(before) == {"x"}  # but for the last moment
        page.get_by_text("The answer is not complete.").wait_for()
        may_go.set()
        page.get_by_role("button", name="Continue").click()
        page.get_by_text("The answer is not complete.").wait_for(state="detached")
        page.get_by_role("button", name="Regenerate").wait_for()
        assert set(answer_of(page)) == {"x"} and len(answer_of(page)) >= max(30, len(before))


def test_a_reopened_chat_has_its_tokens_and_forks(page: Any) -> None:
    ask(page, "Tell me a short story.")
    show_tokens(page)
    before = text_of(page)
    until_kept(page, 1)
    page.reload()
    open_talk(page, "Tell me a short story.")
    page.locator(".message.assistant .t").first.wait_for()
    assert text_of(page) == before
    page.get_by_role("button", name="Details").click()
    page.locator(".under .timeline").wait_for()
    page.locator(".message.assistant .t").nth(2).click()
    page.locator("button.odd").first.click()
    page.get_by_text("2/2").wait_for()
    page.get_by_role("button", name="Regenerate").wait_for()
    assert page.locator(".message.assistant .t.forced").count() == 1


def test_what_was_deleted_comes_back(chat: Any) -> None:
    ask(chat, "keep me")
    act(chat, "keep me", "Delete")
    chat.locator(".message").first.wait_for(state="detached")
    chat.get_by_role("button", name="Undo").click()
    chat.locator(".message.user .said-text").get_by_text("keep me").wait_for()
    chat.locator(".message.assistant").get_by_role("button", name="Delete").click()
    chat.locator(".message.assistant").wait_for(state="detached")
    chat.get_by_role("button", name="Undo").click()
    chat.locator(".message.assistant").wait_for()
    chat.reload()
    open_talk(chat, "keep me")
    chat.locator(".message.assistant").wait_for()
    assert answer_of(chat) == SAID


def test_drafts_and_prompts_stay(chat: Any) -> None:
    chat.get_by_label("Message").fill("half a thou")
    go(chat, "Complete")
    chat.get_by_label("Prompt").fill("My own prompt")
    go(chat, "Chat")
    assert chat.get_by_label("Message").input_value() == "half a thou"
    chat.reload()
    assert chat.get_by_label("Message").input_value() == "half a thou"
    complete(chat, "My own prompt")
    complete(chat, "Another prompt")
    chat.get_by_label("History").get_by_role("button", name=re.compile("My own prompt")).click()
    assert chat.get_by_label("Prompt").input_value() == "My own prompt"


def test_conversations_are_found_renamed_and_travel_as_files(chat: Any, tmp_path: Path) -> None:
    ask(chat, "about apples")
    chat.get_by_role("button", name="New conversation").click()
    ask(chat, "about pears")
    chat.get_by_label("Search conversations").fill("apples")
    history = chat.get_by_label("History")
    history.get_by_role("button", name="about pears", exact=True).wait_for(state="detached")
    act(chat, "about apples", "Rename")
    chat.get_by_label("Title").fill("Fruit")
    chat.keyboard.press("Enter")
    chat.get_by_label("Search conversations").fill("fruit")
    with chat.expect_download() as saved:
        act(chat, "Fruit", "Export")
    path = tmp_path / "fruit.json"
    saved.value.save_as(path)
    act(chat, "Fruit", "Delete")
    chat.get_by_label("Trace file").set_input_files(path)
    open_talk(chat, "Fruit")
    assert messages(chat) == ["about apples"] and answer_of(chat) == SAID
    path.write_text("{}")
    chat.get_by_label("Trace file").set_input_files(path)
    chat.get_by_text("fruit.json is no conversation that this page saved.").wait_for()


def test_the_answer_of_a_limit_says_so_and_continues(chat: Any) -> None:
    """The limit is shown and read by screen readers, and the text continues to its end."""
    chat.get_by_role("tab", name="Settings").click()
    chat.locator("input[name=max_tokens]").fill("4")
    ask(chat, "Hello")
    chat.get_by_text("The answer stopped at the limit of tokens.").wait_for()
    assert SAID.startswith(answer_of(chat)) and answer_of(chat) != SAID
    chat.locator(".spoken p").get_by_text("Stopped at the limit of tokens.").wait_for(state="attached")
    chat.locator("input[name=max_tokens]").fill("")
    while chat.get_by_role("button", name="Continue").count():
        chat.get_by_role("button", name="Continue").click()
        chat.get_by_role("button", name="Regenerate").wait_for()
    assert answer_of(chat) == SAID
    assert chat.locator(".message.assistant").count() == 1


def test_settings_belong_to_a_conversation(chat: Any) -> None:
    chat.get_by_role("tab", name="Settings").click()
    ask(chat, "with a system prompt")
    chat.get_by_role("textbox", name="System prompt").fill("Be brief.")
    chat.get_by_role("button", name="New conversation").click()
    assert chat.get_by_role("textbox", name="System prompt").input_value() == ""
    open_talk(chat, "with a system prompt")
    assert chat.get_by_role("textbox", name="System prompt").input_value() == "Be brief."
    chat.get_by_role("combobox", name="Preset").select_option("Exact")
    chat.locator("input[name=temperature]").fill("0.3")
    chat.get_by_role("button", name="Save as a preset").click()
    chat.get_by_label("Name of the preset").fill("Mine")
    chat.keyboard.press("Enter")
    chat.get_by_role("button", name="New conversation").click()
    chat.get_by_role("combobox", name="Preset").select_option("Mine")
    with chat.expect_request("**/v1/chat/completions") as asked:
        ask(chat, "again")
    assert asked.value.post_data_json["temperature"] == 0.3
