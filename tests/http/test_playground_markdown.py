"""Tests of answers as Markdown: code, tables, formulas. No part of an answer becomes HTML or loads a resource."""

from __future__ import annotations

from typing import Any

from tests.http.browser import opened
from tests.http.harness import saying, scripted_model, served
from tests.http.playground_kit import MARKDOWN, MARKS, ask

pytestmark = MARKS


def test_markdown_is_shown(browser: Any) -> None:
    with (
        served(scripted_model(next_token=saying(MARKDOWN), max_model_len=2048)) as url,
        opened(browser, url, permissions=["clipboard-read", "clipboard-write"]) as page,
    ):
        ask(page, "Show all of it")
        said = page.locator(".message.assistant .markdown")
        assert said.get_by_role("heading", name="A title").get_attribute("aria-level") == "2"
        assert said.locator("strong").inner_text() == "bold"
        assert said.locator(".hljs-keyword").all_inner_texts() == ["def", "return"]
        said.get_by_role("button", name="Copy code").click()
        said.get_by_role("button", name="Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == "def double(n):\n    return 2 * n"
        assert said.locator("td").all_inner_texts() == ["Ann", "7"]
        assert said.locator("math").count() == 2 and said.locator("mfrac").count() == 1
        assert said.locator("a").evaluate_all("all => all.map(each => each.href)") == [
            "https://example.org/",
            "https://example.org/a.png",
        ]
        assert said.get_by_role("checkbox").is_checked()
        assert "<script>alert(2)</script>" in said.inner_text()
        assert said.locator("img, script").count() == 0


def test_text_files_travel_in_the_message(page: Any) -> None:
    file = {"name": "notes.md", "mimeType": "text/markdown", "buffer": b"one\n```\ntwo\n```\n"}
    page.get_by_label("Attach texts").set_input_files(file)
    page.get_by_role("button", name="Remove notes.md").wait_for()
    page.get_by_label("Message").fill("What is in it?")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.keyboard.press("Enter")
    said = asked.value.post_data_json["messages"][-1]["content"]
    assert said == "notes.md:\n````md\none\n```\ntwo\n```\n````\n\nWhat is in it?"
    page.get_by_role("button", name="Regenerate").wait_for()
