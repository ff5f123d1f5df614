"""Tests of forks in the playground: a user chooses another token, and the text continues from there."""

from __future__ import annotations

import re
from typing import Any

from tests.http.playground_kit import (
    MARKS,
    SELECT,
    SHOWN,
    complete,
    go,
    plainly,
    settle,
    steer,
    text_of,
    until_kept,
    write,
)

pytestmark = MARKS


def test_a_text_forks_and_goes_on(page: Any) -> None:
    complete(page)
    before = page.locator(".tokens .t").all_text_contents()
    page.locator(".tokens > .chunk .t").nth(3).click()
    chosen = page.locator("button.odd code").first.inner_text().replace("␣", " ")
    page.locator("button.odd").first.click()
    page.locator(".ancestry").wait_for()
    settle(page)
    after = page.locator(".tokens .t").all_text_contents()
    at = page.locator(".prompt-text .t").count() + 3
    assert after[:at] == before[:at] and after[at] == chosen


def test_a_steered_text_forks_under_its_constraint(page: Any) -> None:
    steer(page, "Regex", "A telephone number")
    settle(page)
    page.locator(".tokens > .chunk .t").nth(1).click()
    page.locator("button.odd").first.click()
    page.locator(".ancestry").wait_for()
    settle(page)
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", text_of(page)), text_of(page)


def test_a_fork_survives_a_reload(page: Any) -> None:
    complete(page)
    page.locator(".tokens > .chunk .t").nth(3).click()
    page.locator("button.odd").first.click()
    page.locator(".ancestry").wait_for()
    settle(page)
    before, told = page.locator(".tokens .t").all_text_contents(), page.locator(".ancestry").inner_text()
    until_kept(page, 2)
    page.reload()
    go(page, "Complete")
    page.get_by_label("History").get_by_role("button", name="Once upon a time").first.click()
    page.locator(".ancestry").wait_for()
    assert page.locator(".tokens .t").all_text_contents() == before
    assert page.locator(".ancestry").inner_text() == told
    assert page.locator(".tokens > .chunk .t.forced").count() == 1


#: A program whose branches go on by themselves.
BRANCHES = """await $`A: `
const n = await fork(3)
await $`${["cat", "dog", "bird"][n]} `
await gen({ regex: /[a-z ]+\\./, maxTokens: 6, storeVar: "said" + n, temperature: 0.8 })
"""


SEEN = "all => all.map(each => [each.textContent, each.className])"


def choose(page: Any, number: int, *, forbidden: bool = False) -> str:
    """Choose another candidate at the given token of the shown output, and return the candidate."""
    page.locator(".tokens > .chunk .t").nth(number).click()
    row = page.locator("button.odd.forbidden" if forbidden else "button.odd:not(.forbidden)").first
    text: str = row.locator("code").inner_text().replace("␣", " ")
    row.click()
    if forbidden:
        page.get_by_role("button", name="Continue without the rule").click()
    page.locator(".ancestry").wait_for()
    settle(page)
    return text


def run_program(page: Any, language: str, program: str) -> None:
    page.get_by_role("tab", name="Settings").click()
    page.locator("input[name=seed]").fill("7")
    go(page, "Steer")
    plainly(page)
    page.get_by_label("Language").select_option(label=language)
    page.locator(".editor .cm-content").wait_for()
    write(page, program)
    page.get_by_label("Prompt").fill("" if language == "JavaScript" else "Once upon")
    page.get_by_role("button", name="Run", exact=True).click()
    settle(page)


def test_a_steered_fork_keeps_the_origins_of_its_tokens(page: Any) -> None:
    """Tokens before the fork keep their origin, and the origin of the chosen token is the user's choice."""
    run_program(page, "Regex", "[a-z ]{30,40}[.]")
    before = page.locator(".tokens > .chunk .t").evaluate_all(SEEN)
    chosen = choose(page, 3)
    after = page.locator(".tokens > .chunk .t").evaluate_all(SEEN)
    assert after[:3] == before[:3]
    assert after[3][0] == chosen and after[3][1].startswith("t forced")
    assert page.locator("#inspector .origin").inner_text().startswith("Forced by you")
    assert page.locator("#inspector .token-name").inner_text().replace("␣", " ") == chosen


def test_a_forbidden_candidate_is_offered_without_the_rule(page: Any) -> None:
    run_program(page, "Regex", "[0-9]{3}-[0-9]{4}")
    page.locator(".tokens > .chunk .t").first.click()
    row = page.locator("button.odd.forbidden").first
    row.locator("s").wait_for()
    assert "forbidden" in row.inner_text()
    chosen = choose(page, 0, forbidden=True)
    text = text_of(page)
    assert text.startswith(chosen) and not re.fullmatch(r"[0-9]{3}-[0-9]{4}", text)
    assert "without its rule" in page.locator(".ancestry").inner_text()


def test_a_branch_of_a_program_forks_under_the_program(page: Any) -> None:
    """The program runs again with all of its branches, and one branch has the chosen token. A fork of this branch also
    runs the program again."""
    run_program(page, "JavaScript", BRANCHES)
    page.get_by_role("treeitem").nth(1).click()
    kept = page.locator(".tokens > .chunk .t").all_text_contents()
    first = page.locator(".tokens > .chunk .t.sampled, .tokens > .chunk .t.fought").first
    at = int(first.get_attribute("data-n"))
    chosen = choose(page, at + 1)
    assert page.get_by_role("treeitem").count() == 3
    assert page.get_by_role("treeitem", selected=True).locator(".fork-name").inner_text() == "1"
    texts = page.locator(".tokens > .chunk .t").all_text_contents()
    assert texts[: at + 2] == [*kept[: at + 1], chosen]
    assert page.locator(".said dt").all_inner_texts() == ["said1"]
    again = choose(page, at)
    texts = page.locator(".tokens > .chunk .t").all_text_contents()
    assert texts[: at + 1] == [*kept[:at], again]
    assert page.locator(".said dt").all_inner_texts() == ["said1"]


def test_a_program_that_rolled_back_forks(page: Any) -> None:
    run_program(
        page,
        "JavaScript",
        'import { Label } from "aici"\nconst start = new Label()\nawait gen({ regex: /[a-z ]+\\./, maxTokens: 4 })\n'
        "await start.rewind()\nawait gen({ regex: /[A-Z ]+\\./, maxTokens: 6 })\n",
    )
    alive = page.locator(".tokens > .chunk .t:not(.rewound)")
    rolled = page.locator(".tokens > .chunk .t.rewound").all_text_contents()
    kept = alive.all_text_contents()
    alive.nth(2).click()
    page.locator("button.odd:not(.forbidden)").first.click()
    page.locator(".ancestry").wait_for()
    settle(page)
    assert page.locator(".tokens > .chunk .t.rewound").all_text_contents() == rolled
    assert alive.all_text_contents()[:2] == kept[:2]


def test_a_selected_text_becomes_a_rule(page: Any) -> None:
    """The text before the selection stays, and the new text after it follows the constraint."""
    page.get_by_role("tab", name="Settings").click()
    page.locator("input[name=seed]").fill("7")
    complete(page)
    before = page.locator(".tokens > .chunk .t").all_text_contents()
    page.evaluate(SELECT, [5, 5])
    page.get_by_role("button", name="A number here").click()
    page.get_by_text("under a new rule").wait_for()
    settle(page)
    kept, rest = "".join(before[:5]), text_of(page)
    assert rest.startswith(kept) and re.match(r" ?[0-9]+([^0-9]|$)", rest[len(kept) :])
    page.locator(".ancestry .link").click()
    page.get_by_text("under a new rule").wait_for(state="detached")
    page.evaluate(SELECT, [5, 5])
    page.get_by_role("button", name="Never this").click()
    page.get_by_text("under a new rule").wait_for()
    settle(page)
    rest = "".join(page.locator(".tokens > .chunk").evaluate_all(SHOWN))
    assert rest.startswith(kept) and before[5].strip() not in rest[len(kept) :]
    page.locator(".ancestry .link").click()
    page.get_by_text("under a new rule").wait_for(state="detached")
    page.evaluate(SELECT, [5, 6])
    page.get_by_role("button", name="One of").click()
    page.get_by_label("One of these, with commas between").fill("red, green")
    page.keyboard.press("Enter")
    page.get_by_text("under a new rule").wait_for()
    settle(page)
    rest = text_of(page)
    assert rest.startswith(kept) and re.match(r" ?(red|green)", rest[len(kept) :])


def test_the_forks_of_a_text_are_a_tree(page: Any) -> None:
    """The page shows the text, a fork of it, and a fork of the fork, each with the chosen token and its probability."""
    complete(page)
    first = choose(page, 3)
    second = choose(page, 5)
    rows = page.get_by_label("Forks of this text").get_by_role("button")
    assert rows.count() == 3
    chosen = [text.replace("␣", " ") for text in rows.locator("code").all_inner_texts()]
    assert chosen == [first, second]
    assert all(re.search(r"[0-9.]+ %", text) for text in rows.locator(".fork-more").all_inner_texts())
    assert rows.nth(2).get_attribute("aria-current") == "true" and "depth3" in rows.nth(2).get_attribute("class")
    rows.first.click()
    page.locator(".ancestry").wait_for(state="detached")
    assert rows.first.get_attribute("aria-current") == "true"
