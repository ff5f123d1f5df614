"""Tests of conversations in the playground: versions of messages, stopped answers, and files."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.http.browser import opened
from tests.http.harness import saying, scripted_model, served, tokenizer
from tests.http.parked_chats import THINKING
from tests.http.playground_kit import MARKS, answer_of, ask, go, settle, show_tokens, text_of
from tests.http.tool_calls import a_tokenizer
from tests.waiting import PATIENCE

pytestmark = MARKS


def test_a_chat_branches_and_is_there_again(page: Any) -> None:
    page.get_by_label("Message").fill("Tell me a short story.")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for()
    first = answer_of(page)
    assert len(first) > 20
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("2/2").wait_for()
    page.get_by_role("button", name="Regenerate").wait_for()
    page.get_by_role("button", name="Earlier version").click()
    page.get_by_text("1/2").wait_for()
    assert answer_of(page) == first
    page.locator(".message.user").hover()
    page.locator(".message.user").get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("What can you do?")
    page.locator(".editing").get_by_role("button", name="Send").click()
    page.locator(".message.user").get_by_text("2/2").wait_for()
    page.get_by_role("button", name="Regenerate").wait_for()
    page.locator(".message.user").get_by_role("button", name="Earlier version").click()
    page.locator(".said-text").get_by_text("Tell me a short story.").wait_for()
    page.reload()
    page.get_by_label("History").get_by_role("button", name="Tell me a short story.", exact=True).click()
    page.locator(".message.assistant .markdown").wait_for()
    assert answer_of(page) == first


def test_an_answer_forks_at_an_alternative(page: Any) -> None:
    page.get_by_label("Message").fill("Tell me a short story.")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for()
    show_tokens(page)
    before = text_of(page)
    page.locator(".message.assistant .t").nth(4).click()
    page.locator("button.odd").first.click()
    page.locator(".ancestry").wait_for()
    page.get_by_role("button", name="Regenerate").wait_for()
    page.locator(".message.assistant").get_by_text("2/2").wait_for()
    kept = "".join(page.locator(".message.assistant .t").all_text_contents()[:4])
    assert before.startswith(kept) and page.locator(".message.assistant .t.forced").count() == 1


def test_stop_stops(browser: Any) -> None:
    may_go = threading.Event()

    def next_token(prefix: Any) -> int:
        if len(prefix) > 40:
            may_go.wait(PATIENCE)
        return tokenizer().encode("x", add_special_tokens=False)[0]

    with served(scripted_model(next_token=next_token)) as url, opened(browser, url) as page:
        try:
            go(page, "Complete")
            page.get_by_role("button", name="Generate").click()
            page.locator("main .state.running").wait_for()
            page.locator(".t.sampled").first.wait_for()
            page.locator(".run-head").get_by_role("button", name="Stop").click()
            settle(page, "stopped")
        finally:
            may_go.set()
        assert page.locator(".notice").count() == 0


def reading(page: Any, *modalities: str) -> None:
    """Pretend that the model reads this kind of file, because only the sent request is tested."""
    row = {"id": "sees", "state": "loaded", "task": "generate", "input_modalities": ["text", *modalities]}
    page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": [row]}))
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json={"error": {"message": "seen"}}))
    page.reload()


@pytest.mark.parametrize(
    ("modality", "kind", "tag"), [("image", "png", "img"), ("audio", "wav", "audio"), ("video", "mp4", "video")]
)
def test_files_travel_with_the_message(page: Any, modality: str, kind: str, tag: str) -> None:
    reading(page, "image", "audio", "video")
    file = {"name": f"it.{kind}", "mimeType": f"{modality}/{kind}", "buffer": b"\0" * 64}
    page.get_by_label("Attach texts, PDFs, images, sounds and videos").set_input_files(file)
    page.locator(".attached button").wait_for()
    page.get_by_label("Message").fill("What is it?")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.keyboard.press("Enter")
    part, said = asked.value.post_data_json["messages"][-1]["content"]
    assert part["type"] == f"{modality}_url" and said["text"] == "What is it?"
    assert part[f"{modality}_url"]["url"].startswith(f"data:{modality}/{kind};base64,")
    page.locator(f".message.user {tag}").wait_for()
    page.locator(".notice").get_by_text("seen").wait_for()


def test_what_a_model_does_not_read_is_told_in_words(page: Any) -> None:
    reading(page, "audio")
    image = {"name": "a.png", "mimeType": "image/png", "buffer": b"x"}
    page.get_by_label("Attach texts, PDFs and sounds").set_input_files(image)
    page.locator(".notice").get_by_text("The model reads texts, PDFs and sounds; a.png is an image.").wait_for()
    large = {"name": "long.wav", "mimeType": "audio/wav", "buffer": bytes((16 << 20) + 1)}
    page.get_by_label("Attach texts, PDFs and sounds").set_input_files(large)
    page.locator(".notice").get_by_text("long.wav has 16.0 MiB; at most 16 are taken.").wait_for()
    assert page.locator(".attached").count() == 0


def test_thoughts_are_folded_above_the_answer(browser: Any) -> None:
    """The reasoning unfolds on a click, and is restored with the conversation."""
    text = a_tokenizer(THINKING)
    model = scripted_model(text=text, next_token=saying("<think>It is a city.</think>In Norway.", text))
    with served(model) as url, opened(browser, url) as page:
        ask(page, "Where is Oslo?")
        assert answer_of(page) == "In Norway."
        for _ in range(2):
            thoughts = page.locator(".message.assistant details")
            assert thoughts.get_attribute("open") is None
            thoughts.get_by_text("Thoughts").click()
            thoughts.get_by_text("It is a city.").wait_for()
            page.reload()
            page.get_by_label("History").get_by_role("button", name="Where is Oslo?", exact=True).click()
