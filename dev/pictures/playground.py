"""Screenshots of the playground and an animated recording, taken in Chromium from a running server.

    bridle serve smollm2                                       # in another terminal
    python -m dev.pictures.playground http://127.0.0.1:8080 docs/pictures

Needs Playwright and the system's Chromium. Playwright takes the screenshots, and Pillow combines frames into one
animated WebP.
"""

from __future__ import annotations

import io
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import Any

from PIL import Image

#: Maximum bytes of a recording.
MAX_RECORDING = 2_000_000
RECORDING = "playground.webp"
_SIZE = {"width": 1280, "height": 720}
_PAUSE = 0.12  # seconds between frames
_PATIENCE = 60  # seconds that an answer may take
_SAMPLING = {"seed": "7", "temperature": "0.2"}


class Recorder:
    """Frames of a page in the browser, each with its display time."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.frames: list[Image.Image] = []
        self.times: list[int] = []

    def watch(self, seconds: float) -> None:
        """Record frames for some seconds. A frame that equals the previous one only extends that frame's
        display time."""
        end = time.monotonic() + seconds
        while (began := time.monotonic()) < end:
            frame = Image.open(io.BytesIO(self.page.screenshot(type="png"))).convert("RGB")
            time.sleep(max(0.0, _PAUSE - (time.monotonic() - began)))
            lasted = round(1000 * (time.monotonic() - began))
            if self.frames and frame.tobytes() == self.frames[-1].tobytes():
                self.times[-1] += lasted
                continue
            self.frames.append(frame)
            self.times.append(lasted)

    def watch_until(self, selector: str) -> None:
        """Record frames until an element appears on the page."""
        end = time.monotonic() + _PATIENCE
        while not self.page.locator(selector).count():
            assert time.monotonic() < end, f"{selector} did not come within {_PATIENCE} s"
            self.watch(2 * _PAUSE)

    def save(self, path: Path) -> None:
        """Write the frames as an animated WebP."""
        first, *rest = self.frames
        first.save(path, save_all=True, append_images=rest, duration=self.times, loop=0, quality=55, method=4)
        size = path.stat().st_size
        assert size <= MAX_RECORDING, f"{path.name} has {size} bytes, more than {MAX_RECORDING}: lower the quality"
        print(f"{path}: {len(self.frames)} frames, {sum(self.times) / 1000:.1f} s, {size} bytes")


@contextmanager
def opened(url: str, size: dict[str, int] = _SIZE, **options: Any) -> Iterator[Any]:
    """Yield a browser page with the playground, without stored data and with a fixed seed."""
    from playwright.sync_api import sync_playwright

    path = which("chromium") or which("chromium-browser") or which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_context(viewport=size, **options).new_page()
        page.set_default_timeout(1000 * _PATIENCE)
        page.goto(url)
        page.evaluate("kept => localStorage.setItem('bridle.sampling', kept)", json.dumps(_SAMPLING))
        page.reload()
        page.locator("#model option").first.wait_for(state="attached")
        yield page
        browser.close()


def run_example(page: Any, name: str) -> None:
    """Run a JavaScript example twice, because the first run waits for the script interpreter to be compiled."""
    page.get_by_role("tab", name="Steer").click()
    page.get_by_label("Example").select_option(label=name)
    for number in (1, 2):
        page.get_by_role("button", name="Run", exact=True).click()
        page.locator(".twins .state.done").nth(1).wait_for()
        assert page.locator(".notice").count() == 0, f"run {number} failed"


def shoot(page: Any, folder: Path, name: str) -> None:
    """Write a screenshot with few colours, to keep the file small."""
    image = Image.open(io.BytesIO(page.screenshot(animations="disabled"))).convert("RGB")
    image.quantize(128, dither=Image.Dither.NONE).save(folder / f"playground-{name}.png", optimize=True)


def screenshots(url: str, folder: Path) -> None:
    """Take the three screenshots: a controlled output beside the uncontrolled one, a chat, and the view on a phone."""
    with opened(url, {"width": 1360, "height": 860}) as page:
        run_example(page, "Yes or no, and why")
        sampled_word(page).click()
        shoot(page, folder, "steer")
    with opened(url, {"width": 1360, "height": 860}, color_scheme="dark") as page:
        ask(page, "Name three fruits, with a sentence about each.")
        page.locator("footer").get_by_role("button", name="Tokens", exact=True).click()
        page.get_by_role("button", name="Details").click()
        word(page).click()
        shoot(page, folder, "chat")
    with opened(url, {"width": 390, "height": 800}, has_touch=True, is_mobile=True, device_scale_factor=2) as page:
        ask(page, "What can I cook with rice?")
        page.locator("footer").get_by_role("button", name="Tokens", exact=True).click()
        word(page).tap()
        page.locator(".panel.open .odd").first.wait_for()
        shoot(page, folder, "phone")


def sampled_word(page: Any) -> Any:
    """Return the element of a sampled token in the controlled output."""
    return page.get_by_label("Steered", exact=True).locator(".t.sampled", has_text=re.compile("[a-z]{4}")).first


def word(page: Any) -> Any:
    """Return the element of a visible token in the chat's answer."""
    return page.locator(".message.assistant .t").filter(has_text=re.compile("[a-z]{2}")).first


def ask(page: Any, text: str) -> None:
    """Send a message in the chat, and wait for the answer."""
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for()


def record(url: str, path: Path) -> None:
    """Record a controlled output beside the uncontrolled one, one token's candidates, a fork, and a chat under
    a rule."""
    with opened(url) as page:
        run_example(page, "Yes or no, and why")
        camera = Recorder(page)
        camera.watch(1)
        page.get_by_role("button", name="Run", exact=True).click()
        camera.watch_until(".twins .state.done >> nth=1")
        camera.watch(1.5)
        page.locator(".editor").get_by_text("regex").hover()
        camera.watch(1.5)
        sampled_word(page).click()
        camera.watch(2)
        page.locator("button.odd:not(.forbidden)").first.click()
        camera.watch_until(".ancestry")
        camera.watch_until(".outcome .state.done")
        camera.watch(2.5)
        page.get_by_role("tab", name="Chat").click()
        page.get_by_role("button", name="Rules").click()
        page.get_by_label("JSON with these fields").fill("name: string\nage: integer\ncolor: red | green")
        camera.watch(1)
        page.get_by_role("button", name="Rules").click()
        page.get_by_label("Message").fill("Invent a person with a favorite color.")
        camera.watch(0.8)
        page.keyboard.press("Enter")
        camera.watch_until(".message.assistant footer button:has-text('Regenerate')")
        camera.watch(2.5)
        camera.save(path)


if __name__ == "__main__":
    address, target = sys.argv[1], Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    screenshots(address, target)
    record(address, target / RECORDING)
