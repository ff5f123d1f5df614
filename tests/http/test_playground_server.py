"""Tests of the server view: batch, queue, KV cache, requests, effects of policies, and models that the user loads."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from bridle.http import HttpSettings
from bridle.serving.policies import PolicyRegistry
from bridle.serving.tenancy.keys import KeyStore
from tests.http.browser import opened
from tests.http.harness import saying, scripted_model, served, tokenizer
from tests.http.model_server import server_of
from tests.http.playground_kit import MARKS, complete, go
from tests.serving.loaders import FakeLoader
from tests.waiting import PATIENCE

pytestmark = MARKS

POLICIES = """[[policy]]
name = "no-cats"
version = "1"
kind = "phrases"
phrases = ["cat"]
action = "replace"
replacement = "dog"
"""


def waiting(may_go: threading.Event, num_tokens: int) -> Any:
    """Return a script of a model that writes one letter repeatedly, and pauses after `num_tokens` tokens."""
    letter = tokenizer().encode("x", add_special_tokens=False)[0]

    def next_token(prefix: Any) -> int:
        if len(prefix) > num_tokens:
            may_go.wait(PATIENCE)
        return letter

    return next_token


def test_operators_see_requests_and_policies(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "policies.toml"
    path.write_text(POLICIES)
    may_go = threading.Event()
    settings = HttpSettings(policies=PolicyRegistry(path))
    with served(scripted_model(next_token=waiting(may_go, 30)), settings) as url, opened(browser, url) as page:
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


def test_what_a_policy_did_is_counted(browser: Any, tmp_path: Path) -> None:
    """The shown count equals the metric, and grows with each request."""
    path = tmp_path / "policies.toml"
    path.write_text(POLICIES)
    settings = HttpSettings(policies=PolicyRegistry(path))
    model = scripted_model(next_token=saying("My cat sat."))
    with served(model, settings) as url, opened(browser, url) as page:
        go(page, "Server")
        page.get_by_text("no effect yet").wait_for()
        for number in (1, 2):
            complete(page)
            go(page, "Server")
            found = re.findall(r'action="(\w+)".* (\d+)[.]0', policy_metrics(url))
            counts = {action: int(count) for action, count in found}
            assert counts["applied"] == number and counts["replaced"] >= number
            told = ", ".join(f"{action} {count}" for action, count in found)
            page.locator(".rules li", has_text="no-cats").get_by_text(told, exact=True).wait_for()


def policy_metrics(url: str) -> str:
    lines = httpx.get(url + "/metrics").text.splitlines()
    return "\n".join(line for line in lines if line.startswith("bridle_policy_actions_total{"))


def test_operators_see_the_kv_blocks_of_each_user(browser: Any, tmp_path: Path) -> None:
    """Two outputs of a request share the two full KV blocks of its prompt, which count once. Each output has one more
    block."""
    keys = KeyStore(tmp_path / "keys.json")
    admin, ann = keys.add("admin", is_admin=True), keys.add("ann")
    may_go = threading.Event()
    body = {"prompt": list(range(5, 41)), "n": 2, "max_tokens": 10, "ignore_eos": True}
    model = scripted_model(next_token=waiting(may_go, 40))
    with served(model, keys=keys) as url, ThreadPoolExecutor(1) as threads, opened(browser, url) as page:
        page.locator("#key").fill(admin)
        page.get_by_role("button", name="Use").click()
        go(page, "Server")
        page.get_by_text("KV blocks of each user").wait_for()
        headers = {"Authorization": f"Bearer {ann}"}
        asked = threads.submit(httpx.post, f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE)
        try:
            page.get_by_text("ann 4 blocks of 16 tokens", exact=True).wait_for()
        finally:
            may_go.set()
        assert asked.result().status_code == 200
    keys.close()


def test_admins_load_and_unload_models(browser: Any) -> None:
    with server_of(FakeLoader({"good": 1, "org/late": 1})) as (url, registry), opened(browser, url) as page:
        go(page, "Server")
        page.get_by_role("button", name="Load org/late").click()
        page.get_by_role("button", name="Unload org/late").wait_for()
        assert registry.slot_of("org/late").model is not None
        page.locator("#model option", has_text=re.compile("^org/late$")).wait_for(state="attached")
        page.get_by_role("button", name="Unload org/late").click()
        page.get_by_role("button", name="Load org/late", exact=True).wait_for()
        assert registry.slot_of("org/late").model is None
