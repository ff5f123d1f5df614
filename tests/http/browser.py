"""A real browser for tests: the system's Chromium, driven by Playwright. Tests are skipped if Chromium or Playwright is
missing."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.waiting import PATIENCE

NAMES = ("chromium", "chromium-browser", "google-chrome")
#: What a browser says when a server refuses or is gone, which is what some tests want.
EXPECTED = ("Failed to load resource",)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser. The test is skipped if no browser is installed."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("no playwright here: pip install playwright")
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no chromium here: apt install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(browser: Any, url: str, *, width: int = 1360, height: int = 860, **options: Any) -> Iterator[Any]:
    """Yield a new browser page without stored data. The page must not fail, break its content security policy, or load
    from other hosts."""
    context = browser.new_context(viewport={"width": width, "height": height}, accept_downloads=True, **options)
    page = context.new_page()
    page.set_default_timeout(1000 * PATIENCE)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("dialog", lambda dialog: [wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()])
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("request", lambda asked: wrong.append(asked.url) if not _is_own(asked.url, url) else None)
    try:
        page.goto(url)
        yield page
    finally:
        context.close()
    wrong = [each for each in wrong if not each.startswith(EXPECTED)]
    assert not wrong, wrong


def _is_own(address: str, url: str) -> bool:
    return address.startswith((url, "data:", f"blob:{url}"))
