"""Tests that the playground shows each error message in the right place."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from bridle.serving import ModelRegistry
from bridle.serving.tenancy.keys import KeyStore
from tests.http.browser import opened
from tests.http.harness import saying, scripted_model, served, serving, tokenizer
from tests.http.playground_kit import MARKS, PASTE, complete, go, plainly, settle, steer, write
from tests.waiting import PATIENCE

pytestmark = MARKS


def program(page: Any, language: str, text: str) -> None:
    go(page, "Steer")
    plainly(page)
    page.get_by_label("Language").select_option(label=language)
    page.locator(".editor .cm-content").wait_for()
    write(page, text)


def test_an_error_is_words_and_its_stack_is_folded(page: Any) -> None:
    program(page, "JavaScript", "await $`one`\n\nnull.x\n")
    page.get_by_role("button", name="Run", exact=True).click()
    notice = page.locator(".outcome .notice")
    notice.wait_for()
    assert "TypeError" in notice.inner_text()
    assert "main:3" not in notice.inner_text() and "memory:" not in notice.inner_text()
    notice.get_by_text("Where").click()
    assert "main:3" in notice.inner_text()


def test_a_wrong_schema_does_not_stand_above_the_run_before(page: Any) -> None:
    steer(page, "JSON schema", "A list of numbers")
    settle(page)
    write(page, '{"type": ')
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator(".outcome .notice").get_by_text("The schema is not JSON").wait_for()
    assert page.locator(".outcome .run").count() == 0


def test_the_line_is_marked_when_run_follows_typing_at_once(page: Any) -> None:
    """The editor checks the text shortly after each change. The editor keeps errors from the server marked."""
    program(page, "JSON program", "")
    wrong = '{"steps": [\n {"Fixed": {"text": {"String": {"str": "a"}}}},\n {"Gen": {"rx": 1}}\n]}'
    content = page.locator(".editor .cm-content")
    content.evaluate(
        f"(element, text) => {{ ({PASTE})(element, text); document.querySelector('.toolbar .primary').click() }}", wrong
    )
    page.locator(".outcome .notice").wait_for()
    mark = page.locator(".editor .cm-line").nth(2).locator(".cm-lintRange-error").first
    mark.wait_for(state="attached")
    page.wait_for_timeout(1500)  # the editor's own look is over
    assert mark.count() == 1


def test_a_run_is_not_hidden_by_another_one(browser: Any) -> None:
    """The Enter key in the prompt's field starts no second run during a run."""
    may_go = threading.Event()

    def next_token(prefix: Any) -> int:
        if len(prefix) > 20:
            may_go.wait(PATIENCE)
        return tokenizer().encode("x", add_special_tokens=False)[0]

    with served(scripted_model(next_token=next_token)) as url, opened(browser, url) as page:
        try:
            program(page, "Regex", "x{200,300}")
            page.get_by_role("button", name="Run", exact=True).click()
            page.locator("main .state.running").wait_for()
            page.get_by_label("Prompt").press("Control+Enter")
            assert page.get_by_label("History").locator("ul .open").count() == 1
        finally:
            may_go.set()


def test_a_screen_reader_is_not_told_the_run_before(browser: Any) -> None:
    with served(scripted_model(next_token=saying("One fine day."))) as url, opened(browser, url) as page:
        complete(page, "first")
        page.locator(".spoken p").get_by_text("End of the text.").wait_for(state="attached")
        complete(page, "second")
        page.locator(".spoken p").get_by_text("End of the text.").wait_for(state="attached")
        told = "".join(page.locator(".spoken p").all_text_contents())
        assert told == "One fine day.End of the text."


def test_plain_pages_are_read_with_the_key(browser: Any, tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys.json")
    key = store.add("ann", is_admin=True)
    registry = ModelRegistry([scripted_model()])
    with serving(registry, keys=store) as url, opened(browser, url) as page:
        page.locator("#key").fill(key)
        page.get_by_role("button", name="Use").click()
        page.locator("#model option").get_by_text("scripted").wait_for(state="attached")
        page.get_by_role("link", name="Metrics").click()
        page.get_by_role("dialog").get_by_text("# HELP").first.wait_for()
        page.get_by_role("button", name="Close").click()
