"""Tests of the playground in a real browser: several models, API keys, errors and hostile texts."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from bridle.serving import ModelRegistry
from bridle.serving.tenancy.keys import KeyStore
from tests.http.browser import opened
from tests.http.harness import saying, scripted_model, served, serving
from tests.http.playground_kit import (
    HOSTILE,
    MARKS,
    answer_of,
    complete,
    go,
    hostile_trace,
    plainly,
    settle,
    show_tokens,
    text_of,
    write,
)
from tests.waiting import PATIENCE

pytestmark = MARKS


def test_several_models_are_chosen_from(browser: Any) -> None:
    """Each view uses the chosen model, and the choice is stored. The second of two runs may use another model."""
    models = [
        scripted_model(name=name, next_token=saying(said)) for name, said in (("one", "Good day."), ("two", "Bye."))
    ]
    with serving(ModelRegistry(models)) as url, opened(browser, url) as page:
        choice = page.locator("#model")
        choice.locator("option").nth(1).wait_for(state="attached")
        assert choice.locator("option").all_inner_texts() == ["one", "two"]
        complete(page)
        assert text_of(page) == "Good day."
        choice.select_option("two")
        complete(page)
        assert text_of(page) == "Bye."
        go(page, "Steer")
        plainly(page)
        page.get_by_label("Language").select_option(label="Regex")
        page.locator(".editor .cm-content").wait_for()
        write(page, "[A-Z][a-z]+[.]")
        page.get_by_role("button", name="Run", exact=True).click()
        settle(page)
        assert text_of(page) == "Bye."
        page.reload()
        choice.locator("option:checked").get_by_text("two").wait_for(state="attached")
        go(page, "Chat")
        page.get_by_label("Message").fill("hello")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Regenerate").wait_for()
        assert page.locator(".message.assistant .who").inner_text().startswith("two")
        assert answer_of(page) == "Bye."
        choice.select_option("one")
        page.get_by_role("button", name="Regenerate").click()
        page.get_by_text("2/2").wait_for()
        page.get_by_role("button", name="Regenerate").wait_for()
        assert page.locator(".message.assistant .who").inner_text().startswith("one")
        assert answer_of(page) == "Good day."
        complete(page)
        page.get_by_role("button", name="Compare").last.click()
        page.get_by_label("Model of the second run").select_option("two")
        page.get_by_role("button", name="Run beside").click()
        page.get_by_text("tokens differ").wait_for()
        assert (text_of(page), text_of(page, 1)) == ("Good day.", "Bye.")


def test_what_is_copied_does_the_same(browser: Any, playground_url: str) -> None:
    with opened(browser, playground_url, permissions=["clipboard-read", "clipboard-write"]) as page:
        complete(page, 'It\'s a "test": ')
        text = text_of(page)
        copied = {}
        for name in ("As curl", "As Python", "As JavaScript"):
            page.get_by_role("button", name="Copy").click()
            page.get_by_role("button", name=name).click()
            page.get_by_text("Copied").wait_for()
            copied[name] = page.evaluate("navigator.clipboard.readText()")
    options: Any = {"capture_output": True, "text": True, "check": True, "timeout": PATIENCE}
    curl = subprocess.run([*shlex.split(copied["As curl"].replace("\\\n", "")), "-sS"], **options).stdout
    assert json.loads(curl)["choices"][0]["text"] == text
    assert subprocess.run([sys.executable, "-c", copied["As Python"]], **options).stdout == text + "\n"
    assert "fetch(" in copied["As JavaScript"] and "It's a" in copied["As JavaScript"]


def test_keys_are_asked_for_and_kept_for_the_session(browser: Any, tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys.json")
    key = store.add("ann")
    registry = ModelRegistry([scripted_model(name="secret", next_token=saying("good day"))])
    with serving(registry, keys=store) as url, opened(browser, url) as page:
        page.get_by_text("an API key is needed").wait_for()
        assert "secret" not in page.content()
        page.locator("#key").fill("wrong")
        page.get_by_role("button", name="Use").click()
        page.get_by_text("this server does not know the API key").wait_for()
        page.locator("#key").fill(key)
        page.get_by_role("button", name="Use").click()
        page.locator("#model option").get_by_text("secret").wait_for(state="attached")
        page.get_by_label("Message").fill("hi")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Regenerate").wait_for()
        assert answer_of(page) == "good day"
        assert key not in page.evaluate("JSON.stringify(localStorage)")
        assert page.evaluate("sessionStorage.getItem('key')") == key


def test_a_server_that_is_gone_is_told_in_words(browser: Any) -> None:
    with served(scripted_model()) as url, opened(browser, url) as page:
        go(page, "Complete")
        page.get_by_label("Prompt").wait_for()
        page.context.set_offline(True)
        page.get_by_role("button", name="Generate").click()
        page.get_by_text("The server cannot be reached").wait_for()
        page.context.set_offline(False)
        page.get_by_role("tab", name="Settings").click()
        page.locator("input[name=temperature]").fill("-3")
        page.get_by_role("button", name="Generate").click()
        page.locator(".notice").get_by_text("temperature").wait_for()


def test_a_hostile_text_stays_text(browser: Any, tmp_path: Path) -> None:
    with served(scripted_model(next_token=saying(HOSTILE))) as url, opened(browser, url) as page:
        page.get_by_label("Message").fill(HOSTILE)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Regenerate").wait_for()
        assert answer_of(page) == HOSTILE
        show_tokens(page)
        assert text_of(page) == HOSTILE
        page.reload()
        page.get_by_label("History").get_by_role("button", name=HOSTILE[:20]).first.click()
        page.locator(".message.assistant .t").first.wait_for()
        assert text_of(page) == HOSTILE
        complete(page, HOSTILE)
        path = tmp_path / f"{HOSTILE.replace('/', '')[:60]}.jsonl"
        path.write_text(hostile_trace())
        page.get_by_label("Trace file").set_input_files(path)
        page.get_by_role("treeitem").first.wait_for()
        page.locator(".tokens > .chunk .t").first.click()
        page.locator("button.odd, .odd").first.wait_for()
        assert page.locator("img, b:has-text('bold'), main script").count() == 0
        assert HOSTILE in page.locator(".log").inner_text() and HOSTILE in text_of(page)
