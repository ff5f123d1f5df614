"""Tests of the playground's accessibility: themes, small screens, names, the rules of axe-core, and screen readers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.http.browser import opened
from tests.http.harness import saying, scripted_model, served
from tests.http.playground_kit import (
    BROKEN,
    MARKDOWN,
    MARKS,
    SELECT,
    VIEWS,
    ask,
    check_picture,
    complete,
    go,
    hostile_trace,
    settle,
    show_tokens,
    steer,
    until_kept,
)

pytestmark = MARKS


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_theme_has_its_colours(browser: Any, playground_url: str, scheme: Any) -> None:
    with opened(browser, playground_url, color_scheme=scheme) as page:
        dark = "document.body && getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[0] < 100"
        assert page.evaluate(dark) is (scheme == "dark")
        if scheme == "light":
            page.get_by_role("tab", name="Settings").click()
            page.locator("input[name=seed]").fill("5")
            steer(page, "JavaScript", "Taking back")
            settle(page)
            page.get_by_role("button", name="Run", exact=True).click()  # once more: the first time waits for a compiler
            page.get_by_label("Run 2").locator(".state.done").wait_for()
            page.locator(".tokens .t.rewound").nth(2).click()
            check_picture(page)
        else:
            page.get_by_label("Message").fill("Tell me a short story.")
            page.keyboard.press("Enter")
            page.get_by_role("button", name="Regenerate").wait_for()
            show_tokens(page)
            page.get_by_role("button", name="Details").click()
            page.locator(".message.assistant .t").nth(8).click()
            check_picture(page)
        page.get_by_role("button", name="Theme").click()  # light
        assert page.evaluate(dark) is False
        page.get_by_role("button", name="Theme").click()
        assert page.evaluate(dark) is True


def test_it_fits_a_phone(browser: Any, playground_url: str) -> None:
    with opened(
        browser, playground_url, width=390, height=800, has_touch=True, is_mobile=True, device_scale_factor=2
    ) as page:
        for view in VIEWS:
            go(page, view)
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, view
        complete(page)
        page.locator(".tokens > .chunk .t").nth(4).tap()
        page.locator(".panel.open .odd").first.wait_for()
        check_picture(page)
        page.get_by_role("button", name="Close details").tap()
        page.get_by_role("button", name="History").tap()
        page.locator(".sidebar.open").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_everything_that_can_be_pressed_has_a_name(page: Any) -> None:
    complete(page)
    steer(page, "JavaScript", "Forks that ask")
    settle(page)
    for view in VIEWS:
        go(page, view)
        for role in ("button", "combobox", "textbox", "tab", "slider"):
            found = page.get_by_role(role).evaluate_all(NAMES)  # at one moment: some come and go
            assert [html for name, html in found if not name.strip()] == []


NAMES = """elements => elements.filter(each => each.checkVisibility()).map(each => [
    each.ariaLabel || each.textContent || each.title ||
        [...(each.labels ?? [])].map(label => label.textContent).join(""),
    each.outerHTML])"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_breaks_a_rule_of_accessibility(browser: Any, axe: str, tmp_path: Path, scheme: Any) -> None:
    """axe-core finds no fault in names, roles, contrasts and the order of headings."""
    path = tmp_path / "hostile.jsonl"
    path.write_text(hostile_trace())

    def check(what: str) -> None:
        assert page.evaluate(BROKEN) == [], what

    with served(scripted_model(next_token=saying("Good day to you."))) as url:
        with opened(browser, url, color_scheme=scheme) as page:
            page.evaluate(axe)
            check("an empty chat")
            page.get_by_label("Message").fill("hello")
            page.keyboard.press("Enter")
            page.get_by_role("button", name="Regenerate").wait_for()
            show_tokens(page)
            page.get_by_role("button", name="Details").click()
            page.locator(".message.assistant .t").nth(2).click()
            check("a chat, and one of its tokens")
            go(page, "Complete")
            check("a prompt")
            complete(page)
            page.locator(".tokens > .chunk .t").nth(2).click()
            page.get_by_role("button", name="Copy").click()
            check("a text, one of its tokens, and a menu")
            page.get_by_label("Trace file").set_input_files(path)
            page.get_by_role("treeitem").first.wait_for()
            check("forks, variables, a log, what failed")
            page.get_by_label("Colours").select_option("probability")
            page.get_by_role("tab", name="Settings").click()
            check("probabilities, settings")
            page.get_by_label("Colours").select_option("origin")
            go(page, "Steer")
            page.locator(".editor .cm-content").wait_for()
            check("a program")
            go(page, "Compare")
            check("two runs")
        with opened(browser, url, color_scheme=scheme, width=390, height=800, has_touch=True, is_mobile=True) as page:
            page.evaluate(axe)
            complete(page)
            page.locator(".tokens > .chunk .t").nth(2).tap()
            page.locator(".panel.open .odd").first.wait_for()
            check("a phone, and the details of a token")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_opens_breaks_no_rule_either(browser: Any, axe: str, scheme: Any) -> None:
    """axe-core finds no fault in views with Markdown, constraints, deleted items, paired runs, forbidden candidates, a
    selection, steps, and the server."""

    def check(what: str) -> None:
        assert page.evaluate(BROKEN) == [], what

    model = scripted_model(next_token=saying(MARKDOWN), max_model_len=2048)
    with served(model) as url, opened(browser, url, color_scheme=scheme) as page:
        page.evaluate(axe)
        ask(page, "hello")
        page.get_by_role("button", name="Rules").click()
        page.get_by_label("Pattern").fill("[0-9]+")
        check("an answer with Markdown, and rules")
        page.get_by_role("button", name="Rules").click()
        page.locator(".message.user").hover()
        page.locator(".message.user").get_by_role("button", name="Delete").click()
        page.get_by_role("button", name="Undo").wait_for()
        page.get_by_role("button", name="Actions for hello").click()
        check("an offer to undo, and the actions of a conversation")
        go(page, "Steer")
        page.get_by_label("Language").select_option(label="Regex")
        page.get_by_role("button", name="Run", exact=True).click()
        page.locator(".twins .state.done").nth(1).wait_for()
        page.locator(".tokens > .chunk .t").first.click()
        page.locator("button.odd.forbidden").first.click()
        page.get_by_role("button", name="Continue without the rule").wait_for()
        page.get_by_role("button", name="Step through").first.click()
        page.evaluate(SELECT, [0, 0])
        page.get_by_role("button", name="One of").click()
        check("twins, a forbidden candidate, steps, a selection")
        go(page, "Server")
        page.locator(".card").wait_for()
        check("the server")


def test_sentences_are_told_as_they_come(browser: Any) -> None:
    """A screen reader gets each sentence once and as a whole, and the end of the answer. The screen reader does not
    read earlier content again."""
    said = "One fine day. It was late, and the sun had gone! Then nothing"
    with served(scripted_model(next_token=saying(said))) as url, opened(browser, url) as page:
        complete(page, "Tell")
        page.locator(".spoken p").get_by_text("End of the text.").wait_for(state="attached")
        told = page.locator(".spoken p").all_text_contents()
        assert "".join(told[:-1]) == said and told[-1] == "End of the text."
        assert all(re.search(r"[.!] $", each) for each in told[:-2])
        assert page.locator(".spoken").get_attribute("aria-live") == "polite"
        until_kept(page, 1)
        page.reload()
        go(page, "Complete")
        page.get_by_label("History").get_by_role("button", name="Tell").first.click()
        page.locator(".tokens > .chunk .t").first.wait_for()
        assert page.locator(".spoken p").count() == 0


#: Lets a clock go on by a millisecond whenever it is looked at, and counts what is read or written as JSON in one task,
