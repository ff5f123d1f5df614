"""Tests of programs and constraints in the playground."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.http.playground_kit import (
    DATE,
    EXAMPLES,
    MARKS,
    answer_of,
    be_greedy,
    go,
    plainly,
    run_example,
    settle,
    steer,
    text_of,
    write,
)

pytestmark = MARKS


@pytest.mark.parametrize(("language", "example"), EXAMPLES)
def test_every_example_steers(page: Any, language: str, example: str) -> None:
    assert re.fullmatch(EXAMPLES[language, example], run_example(page, language, example), re.DOTALL)


def test_every_example_says_what_to_expect(page: Any) -> None:
    go(page, "Steer")
    found = []
    for language in page.get_by_label("Language").locator("option").all_inner_texts():
        page.get_by_label("Language").select_option(label=language)
        for example in page.get_by_label("Example").locator("option").all_inner_texts():
            page.get_by_label("Example").select_option(label=example)
            assert page.locator(".expect").inner_text().endswith("."), example
            found.append((language, example))
    assert found == list(EXAMPLES)


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


def test_a_steered_run_has_a_twin_without_the_rule(page: Any) -> None:
    """Both runs have the same message and the same seed, and differ only in the constraint. The example's text says
    what the reader should see."""
    go(page, "Steer")
    page.get_by_label("Language").select_option(label="Regex")
    page.get_by_label("Example").select_option(label="A telephone number")
    page.get_by_label("Example").select_option(label="A date")
    page.get_by_text("or another date, and nothing else").wait_for()
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda asked: bodies.append(asked.post_data_json) if asked.method == "POST" else None)
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator(".twins .state.done").nth(1).wait_for()
    steered, plain = bodies
    assert steered.pop("constraint") == {"regex": DATE}
    assert steered["temperature"] == 0.2  # examples are calm unless one is set
    assert steered == plain and steered["messages"][0]["content"].startswith("What is the date")
    texts = [page.get_by_label(name, exact=True).locator(".tokens > .chunk") for name in ("Steered", "Unsteered twin")]
    assert re.fullmatch(DATE, "".join(texts[0].all_text_contents()))
    assert texts[1].all_text_contents() != texts[0].all_text_contents()


def test_the_rules_of_a_chat_hold_and_become_a_program(page: Any) -> None:
    page.get_by_role("button", name="Rules").click()
    form = page.get_by_role("group", name="Rules for the answers")
    form.get_by_label("One of").fill("red\ngreen")
    page.get_by_label("Message").fill("A color?")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for()
    assert answer_of(page) in ("red", "green")
    form.get_by_label("One of").fill("")
    form.get_by_label("JSON with these fields").fill("name: string\ncolor: red | green")
    form.get_by_label("Never these phrases").fill("as an AI")
    form.get_by_label("At most so many tokens").fill("60")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Regenerate").click()
    body = asked.value.post_data_json
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema["properties"] == {"name": {"type": "string"}, "color": {"enum": ["red", "green"]}}
    assert (body["max_tokens"], body["banned_phrases"]) == (60, ["as an AI"])
    page.get_by_role("button", name="Regenerate").wait_for()
    form.get_by_role("button", name="Show as program").click()
    assert '"jsonSchema"' in page.locator(".editor .cm-content").inner_text()
    assert page.get_by_label("Prompt").input_value() == "A color?"
    page.get_by_label("unsteered twin").uncheck()
    page.get_by_role("button", name="Run", exact=True).click()
    settle(page)
    assert set(json.loads(text_of(page))) == {"name", "color"}


def test_a_recorded_run_is_stepped_through(page: Any) -> None:
    """Rolled-back attempts are listed one by one, and the text is shown as it was after each step."""
    steer(page, "JavaScript", "Taking back")
    settle(page)
    page.get_by_text("attempts were rolled back").click()
    attempts = page.locator(".attempts q").all_inner_texts()
    assert len(attempts) == 3 and all(attempts)
    page.get_by_role("button", name="Step through").click()
    shown = page.locator(".steps .said-text")
    texts = [shown.inner_text()]
    forward = page.get_by_role("button", name="Step forward")
    while forward.is_enabled():
        forward.click()
        texts.append(shown.inner_text())
    assert texts[-1].strip() == "".join(page.locator(".tokens > .chunk .t").all_text_contents()).strip()
    assert len(texts) > 10 and texts[5] != texts[-1] and texts[-1].startswith(texts[1][:10])


def test_a_call_of_gen_and_its_tokens_light_up_together(page: Any) -> None:
    steer(page, "JavaScript", "Yes or no, and why")
    settle(page)
    page.locator(".editor").get_by_text("options").hover()
    page.locator(".tokens .t.lit").first.wait_for()
    assert "".join(page.locator(".tokens .t.lit").all_text_contents()) in ("Yes", "No")
    page.locator(".tokens > .chunk .t").last.hover()
    page.locator(".editor .cm-lit").get_by_text("regex").first.wait_for()
    assert text_of(page).endswith("".join(page.locator(".tokens .t.lit").all_text_contents()))


def test_calls_of_a_python_program_light_up_too(page: Any) -> None:
    """A program has two generation calls. Each call highlights its own tokens, and fixed text belongs to no call."""
    be_greedy(page)
    go(page, "Steer")
    plainly(page)
    page.get_by_label("Language").select_option(label="Python")
    page.locator(".editor .cm-content").wait_for()
    write(page, TWO_CALLS)
    page.get_by_role("button", name="Run", exact=True).click()
    settle(page)
    for name, pattern in (("options", " Yes| No"), ("regex", "[a-z ]{4,8}[.]")):
        page.locator(".editor").get_by_text(name).first.hover()
        page.locator(".tokens .t.lit").first.wait_for()
        assert re.fullmatch(pattern, "".join(page.locator(".tokens .t.lit").all_text_contents()))
    page.locator(".tokens > .chunk .t").first.hover()
    page.locator(".tokens .t.lit").first.wait_for(state="detached")
    page.locator(".tokens > .chunk .t").last.hover()
    page.locator(".editor .cm-lit").get_by_text("regex").first.wait_for()


TWO_CALLS = """import pyaici.server as aici


async def main():
    await aici.FixedTokens("Is the sun hot?\\nIt's")
    await aici.gen_text(options=[" Yes", " No"])
    await aici.FixedTokens(", so ")
    await aici.gen_text(regex="[a-z ]{4,8}[.]", max_tokens=12)


aici.start(main())
"""


def test_the_first_screen_has_an_example_and_its_twin(page: Any) -> None:
    go(page, "Steer")
    page.get_by_text("The answer begins with Yes or No").wait_for()
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator(".twins .state.done").nth(1).wait_for()
    steered = "".join(page.get_by_label("Steered", exact=True).locator(".tokens > .chunk").all_text_contents())
    assert re.fullmatch(r"(Yes|No), because [^.\n]{10,120}[.]", steered)
