"""Tests of files in a chat: texts of PDFs, and images, sounds and videos for checkpoints that read them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bridle.config import ModelConfig
from bridle.serving import load_model
from bridle.serving.controller_runtime import ControlSettings
from tests.fakes import audio_checkpoints, vision_checkpoints
from tests.http.browser import opened
from tests.http.harness import saying, scripted_model, served
from tests.http.playground_kit import MARKS
from tests.multimodal.clips import film, wav

pytestmark = MARKS


def attach(page: Any, name: str, kind: str, data: bytes) -> None:
    page.get_by_label("Attach texts").set_input_files({"name": name, "mimeType": kind, "buffer": data})


def sent(page: Any, text: str) -> Any:
    """Send a message, and return the content of the request."""
    page.get_by_label("Message").fill(text)
    with page.expect_request("**/v1/chat/completions") as asked:
        page.keyboard.press("Enter")
    return asked.value.post_data_json["messages"][-1]["content"]


# -- PDFs --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def printed(browser: Any) -> bytes:
    """Return a PDF of two pages, printed by Chromium. Its fonts are subsets, as in most PDFs."""
    page = browser.new_page()
    page.set_content(
        "<h1>Minutes of the meeting</h1><p>Présents: Zoë, Łukasz &amp; 3 more — “all agreed”.</p>"
        "<p style='break-before: page'>The budget is 1,250 €.</p>"
    )
    data: bytes = page.pdf(format="A5")
    page.close()
    return data


@pytest.fixture(scope="module")
def chat_url() -> Iterator[str]:
    with served(scripted_model(next_token=saying("Good day to you."), max_model_len=4096)) as made:
        yield made


@pytest.fixture
def chat(browser: Any, chat_url: str) -> Iterator[Any]:
    with opened(browser, chat_url) as made:
        yield made


def test_the_text_of_a_pdf_travels_in_the_message(chat: Any, printed: bytes) -> None:
    """The script that reads PDFs is loaded with the first PDF."""
    asked: list[str] = []
    chat.on("request", lambda request: asked.append(request.url))
    assert not any(url.endswith("/pdf.js") for url in asked)
    attach(chat, "minutes.pdf", "application/pdf", printed)
    chat.get_by_role("button", name="Remove minutes.pdf").wait_for()
    assert any(url.endswith("/playground/pdf.js") for url in asked)
    said = sent(chat, "How large is the budget?")
    assert said.startswith("minutes.pdf:\n```\n[Page 1]\nMinutes of the meeting\n")
    assert "Présents: Zoë, Łukasz & 3 more — “all agreed”." in said
    assert "[Page 2]\nThe budget is 1,250 €." in said and said.endswith("```\n\nHow large is the budget?")
    chat.get_by_role("button", name="Regenerate").wait_for()


def test_what_cannot_be_read_of_pdfs_is_told_in_words(chat: Any) -> None:
    image = io.BytesIO()
    Image.new("RGB", (40, 40), "red").save(image, "PDF")
    attach(chat, "scan.pdf", "application/pdf", image.getvalue())
    chat.locator(".notice").get_by_text("scan.pdf has no text: its pages are images.").wait_for()
    attach(chat, "no.pdf", "application/pdf", b"this is no PDF")
    chat.locator(".notice").get_by_text("no.pdf cannot be read as a PDF").wait_for()
    attach(chat, "large.pdf", "application/pdf", b"%PDF-1.7\n" + bytes(33 << 20))
    chat.locator(".notice").get_by_text("large.pdf has 33.0 MiB; at most 32 of a PDF are read.").wait_for()
    assert chat.locator(".attached").count() == 0


# -- images, sounds and videos -------------------------------------------------------------------------------


def served_folder(folder: Path) -> AbstractContextManager[str]:
    config = ModelConfig(str(folder), num_blocks=128, block_size=4)
    return served(load_model(config, control=ControlSettings("off")))


@pytest.fixture(scope="module")
def seeing_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a server with a tiny random checkpoint that reads images and videos."""
    folder = vision_checkpoints.make_seeing("qwen3_vl", tmp_path_factory.mktemp("eyes") / "eyes")
    with served_folder(folder) as url:
        yield url


@pytest.fixture(scope="module")
def hearing_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = audio_checkpoints.make_hearing(tmp_path_factory.mktemp("ears") / "ears")
    with served_folder(folder) as url:
        yield url


def prompt_of(page: Any) -> str:
    """Wait for the model's answer, and return the prompt that the model got."""
    page.get_by_role("button", name="Regenerate").wait_for()
    assert page.locator(".notice").count() == 0
    page.get_by_role("button", name="Details").click()
    text: str = page.locator(".prompt-shown").text_content()
    return text


def png(seed: int) -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.random.RandomState(seed).randint(0, 255, (24, 30, 3), dtype=np.uint8)).save(data, "PNG")
    return data.getvalue()


def brief(page: Any) -> None:
    page.get_by_role("tab", name="Settings").click()
    page.locator("input[name=max_tokens]").fill("4")
    page.locator("input[name=temperature]").fill("0")


def test_a_checkpoint_that_reads_images_answers_about_one(browser: Any, seeing_url: str) -> None:
    """The model's prompt has the placeholder tokens of the image. The next message sends the image again."""
    with opened(browser, seeing_url) as page:
        brief(page)
        attach(page, "it.png", "image/png", png(1))
        page.locator(".attached img").wait_for()
        part, said = sent(page, "What is it?")
        assert part["image_url"]["url"].startswith("data:image/png;base64,") and said["text"] == "What is it?"
        assert prompt_of(page).count("<|image_pad|>") > 1
        page.locator(".message.user img").wait_for()
        with page.expect_request("**/v1/chat/completions") as asked:
            page.get_by_label("Message").fill("And?")
            page.keyboard.press("Enter")
        first = asked.value.post_data_json["messages"][0]["content"]
        assert first[0] == part
        attach(page, "it.wav", "audio/wav", wav())
        page.locator(".notice").get_by_text("it.wav is a sound.").wait_for()


def test_a_checkpoint_that_reads_videos_answers_about_one(browser: Any, seeing_url: str) -> None:
    with opened(browser, seeing_url) as page:
        brief(page)
        attach(page, "it.mp4", "video/mp4", film())
        page.get_by_role("button", name="Remove video 1").wait_for()
        part, _ = sent(page, "What happens?")
        assert part["video_url"]["url"].startswith("data:video/mp4;base64,")
        assert prompt_of(page).count("<|video_pad|>") > 1
        page.locator(".message.user video").wait_for()


def test_a_checkpoint_that_reads_sounds_answers_about_one(browser: Any, hearing_url: str) -> None:
    with opened(browser, hearing_url) as page:
        brief(page)
        attach(page, "it.wav", "audio/wav", wav())
        page.get_by_role("button", name="Remove sound 1").wait_for()
        part, _ = sent(page, "What is it?")
        assert part["audio_url"]["url"].startswith("data:audio/wav;base64,")
        assert prompt_of(page).count("[AUDIO]") > 1
        page.locator(".message.user audio").wait_for()
        attach(page, "it.png", "image/png", png(2))
        page.locator(".notice").get_by_text("it.png is an image.").wait_for()
