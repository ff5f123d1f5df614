"""Tests of tokens in the playground: moving between tokens with the keyboard, colours, and the cached prompt."""

from __future__ import annotations

from typing import Any

from tests.http.playground_kit import MARKS, complete

pytestmark = MARKS


def test_the_keyboard_walks_along_tokens(page: Any) -> None:
    complete(page)
    page.locator(".tokens").focus()
    page.keyboard.press("Home")
    assert page.locator("#inspector .origin").inner_text().startswith("Part of the prompt")
    page.keyboard.press("End")
    page.locator("#inspector").get_by_text("Sampled by the model").wait_for()
    assert page.locator("#inspector .odd").count() == 5
    assert "all tokens" in page.locator("#inspector").inner_text()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "inspector"
    page.keyboard.press("Tab")  # to the first alternative
    assert page.evaluate("document.activeElement.className") == "odd"
    page.get_by_role("slider", name="Time line of steps").focus()
    page.keyboard.press("Home")
    assert page.get_by_role("slider").get_attribute("aria-valuenow") == "0"


def test_a_cached_prompt_shows(page: Any) -> None:
    prompt = "Once upon a time there was a dog. " * 8
    complete(page, prompt)
    page.get_by_role("button", name="Generate again").click()
    page.locator(".prompt-text .t.cached").first.wait_for()


def test_colours_can_tell_probabilities(page: Any) -> None:
    complete(page)
    page.get_by_label("Colours").select_option("probability")
    page.locator(".t.p0").first.wait_for()
