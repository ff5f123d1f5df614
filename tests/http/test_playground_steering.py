"""Programs and constraints in the playground."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.http.playground_kit import MARKS, SHOWN, go, settle, steer, write

pytestmark = MARKS


@pytest.mark.parametrize(
    ("language", "example", "pattern"),
    [
        ("JavaScript", "A sum", r"19 \+ 23 = [0-9]+"),
        ("JavaScript", "Taking back", r"Once upon a time there was.*"),
        ("JavaScript", "A list", r"Three animals:\n1\. [a-z]+\n2\. [a-z]+\n3\. [a-z]+\n"),
        ("Python", "Yes or no", r"Q: Is Paris the capital of France\?\nA: (Yes|No)"),
        ("JSON program", "A sum, used again", r"12 \+ 13 = ([0-9]+), so half of it is not \1"),
        ("JSON program", "A choice", r"The sky is (blue|green|a lie)\."),
        ("Regex", "Lower case", r"[a-z ]+[.]"),
        ("Regex", "A telephone number", r"[0-9]{3}-[0-9]{4}"),
        ("Regex", "Words without an e", r"( [a-df-z]+){4,8}[.]"),
        ("JSON schema", "A list of numbers", r"\[(-?[0-9]+, ){2,4}-?[0-9]+\]"),
        ("Lark", "Greetings", r"(Hello|Good day|Welcome), [A-Z][a-z]{2,8}!"),
    ],
)
def test_every_example_steers(page: Any, language: str, example: str, pattern: str) -> None:
    page.get_by_role("tab", name="Settings").click()
    page.locator("input[name=seed]").fill("7")
    page.locator("input[name=temperature]").fill("0")
    steer(page, language, example)
    settle(page)
    page.get_by_label("fold what was rolled back").check() if page.locator(".fold").count() else None
    text = "".join(page.locator(".tokens > .chunk").evaluate_all(SHOWN))
    assert re.fullmatch(pattern, text, re.DOTALL), text


#: The text of chunks without what was taken back, nor its signs.


def test_forks_are_a_tree(page: Any) -> None:
    steer(page, "JavaScript", "Forks that ask")
    settle(page)
    items = page.get_by_role("treeitem")
    assert items.count() == 3
    items.nth(2).click()
    page.get_by_role("treeitem", selected=True).filter(has_text="bird").wait_for()
    assert page.locator(".said dt").all_inner_texts() == ["bird"]
    assert "FIXED" in page.locator(".log").inner_text()
    items.nth(2).press("ArrowUp")
    page.get_by_role("treeitem", selected=True).filter(has_text="dog").wait_for()


def test_what_was_taken_back_folds(page: Any) -> None:
    steer(page, "JavaScript", "Taking back")
    settle(page)
    assert page.locator("s.rewound").count() > 0
    page.get_by_label("fold what was rolled back").check()
    page.locator("s.rewound").first.wait_for(state="detached")
    page.locator(".fold").first.click()
    page.locator("s.rewound").first.wait_for()


@pytest.mark.parametrize(
    ("language", "program", "line"),
    [
        ("JavaScript", "await $`one`\n\nnull.x\n", 3),
        ("JavaScript", "await $`one`\nlet = = 2\n", 2),
        ("Python", "import pyaici.server as aici\n\nasync def main():\n    1 / 0\n\naici.start(main())\n", 4),
        ("JSON program", '{"steps": [\n {"Fixed": {"text": {"String": {"str": "a"}}}},\n {"Gen": {"rx": 1}}\n]}', 3),
        ("Lark", "start: a\na: b\n", 2),
        ("JSON schema", '{\n  "type": \n}', 3),
    ],
)
def test_errors_are_at_their_line(page: Any, language: str, program: str, line: int) -> None:
    go(page, "Steer")
    page.get_by_label("Language").select_option(label=language)
    page.locator(".editor .cm-content").wait_for()
    write(page, program)
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator(".outcome .notice").wait_for()
    at = page.locator(".editor .cm-line").nth(line - 1)
    at.locator(".cm-lintRange-error, .cm-lintPoint-error").first.wait_for(state="attached")
