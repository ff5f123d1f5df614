"""The view of the server: batch, queue, cache, requests, policies and what they did."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from bridle.http import HttpSettings
from bridle.serving.policies import PolicyRegistry
from tests.http.browser import opened
from tests.http.harness import scripted_model, served, tokenizer
from tests.http.playground_kit import MARKS, go
from tests.waiting import PATIENCE

pytestmark = MARKS

POLICIES = """[[policy]]
name = "no-cats"
version = "1"
kind = "phrases"
phrases = ["cat"]
"""


def test_operators_see_requests_and_policies(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "policies.toml"
    path.write_text(POLICIES)
    may_go = threading.Event()
    letter = tokenizer().encode("x", add_special_tokens=False)[0]

    def next_token(prefix: Any) -> int:
        if len(prefix) > 30:
            may_go.wait(PATIENCE)
        return letter

    settings = HttpSettings(policies=PolicyRegistry(path))
    with served(scripted_model(next_token=next_token), settings) as url, opened(browser, url) as page:
        try:
            go(page, "Server")
            page.get_by_text("No request at the moment.").wait_for()
            page.get_by_text("no-cats").wait_for()
            go(page, "Complete")
            page.get_by_role("button", name="Generate").click()
            go(page, "Server")
            row = page.get_by_label("Requests").get_by_role("row").nth(1)
            row.get_by_text("POST /v1/completions").wait_for()
            page.get_by_role("meter", name="Sequences in the batch").wait_for()
            assert int(page.get_by_role("meter", name="KV blocks in use").get_attribute("aria-valuenow")) >= 1
        finally:
            may_go.set()
        page.get_by_text("No request at the moment.").wait_for()
