"""Tests of the pages for browsers and the printed curl line: on servers with keys, without a chat template, and
offline."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from bridle.http import create_app
from bridle.http.curl_line import curl_line
from bridle.serving import ModelRegistry
from bridle.serving.tenancy.keys import KeyStore
from tests.http.harness import scripted_model, serving, without_template
from tests.waiting import PATIENCE

HTML = {"accept": "text/html"}
NAME = "confidential"


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path / "keys.json")


@pytest.fixture
def locked(store: KeyStore) -> Iterator[TestClient]:
    registry = ModelRegistry([scripted_model(name=NAME)])
    with TestClient(create_app(registry, keys=store)) as client:
        yield client
    registry.close()


def test_pages_open_without_a_key_and_tell_nothing(locked: TestClient) -> None:
    for path in ("/", "/docs"):
        answer = locked.get(path, headers=HTML)
        assert answer.status_code == 200 and NAME not in answer.text
        script = answer.text if path == "/docs" else locked.get("/playground/app.js").text
        assert '"key"' in script and "Authorization" in script
    assert locked.get("/openapi.json").status_code == 200


def test_what_a_page_asks_for_still_needs_a_key(locked: TestClient, store: KeyStore) -> None:
    for path in ("/v1/models", "/metrics", "/v1/status", "/docs/", "/info"):
        assert locked.get(path, headers=HTML).status_code == 401, path
    assert locked.post("/", json={"inputs": "x"}).status_code == 401
    assert locked.delete("/").status_code == 401
    assert locked.get("/", headers=HTML | {"authorization": "Bearer wrong"}).status_code == 401
    key = {"authorization": "Bearer " + store.add("ann")}
    assert locked.get("/v1/models", headers=key).json()["data"][0]["has_chat_template"] is True
    assert locked.get("/v1/models", headers=key).json()["data"][0]["id"] == NAME
    assert NAME not in locked.get("/", headers=HTML | key).text  # the page is the same for everybody


def run_curl(line: str) -> str:
    assert shutil.which("curl")
    return subprocess.run(
        [*shlex.split(line), "-sS"], capture_output=True, text=True, check=True, timeout=PATIENCE
    ).stdout


@pytest.mark.parametrize("has_template", [True, False])
@pytest.mark.parametrize("has_keys", [True, False])
def test_the_printed_line_works(tmp_path: Path, store: KeyStore, has_template: bool, has_keys: bool) -> None:
    text: Any = None if has_template else without_template(tmp_path)
    registry = ModelRegistry([scripted_model(name=NAME, text=text)])
    with serving(registry, keys=store if has_keys else None) as url:
        line = curl_line(registry, url + "/", needs_key=has_keys)
        assert (NAME in line) is not has_keys
        answer = run_curl(line.replace("Bearer KEY", f"Bearer {store.add('ann')}"))
    assert answer.endswith("data: [DONE]\n\n") and '"error"' not in answer, answer


def test_a_model_without_a_template_is_offered_to_continue_texts(tmp_path: Path) -> None:
    registry = ModelRegistry([scripted_model(text=without_template(tmp_path)), scripted_model(name="chats")])
    with TestClient(create_app(registry)) as client:
        assert "/v1/completions" in curl_line(registry, "http://localhost/")
        rows = client.get("/v1/models").json()["data"]
    assert [(row["has_chat_template"], row["reads_pictures"]) for row in rows] == [(False, False), (True, False)]
    registry.close()


def test_the_description_needs_no_network(server: str) -> None:
    answer = httpx.get(server + "/docs", headers=HTML)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"https?://|<script[^>]+src|<link", answer.text)
    document = httpx.get(server + "/openapi.json").json()
    assert "/v1/chat/completions" in document["paths"] and "/docs" not in document["paths"]


@pytest.mark.parametrize("path", ["/docs", "/playground/app.js"])
def test_scripts_of_pages_are_scripts(server: str, path: str) -> None:
    """A JavaScript engine, if installed, parses the scripts of the pages."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here")
    script = httpx.get(server + path, headers=HTML).text
    if path == "/docs":
        (script,) = re.findall(r"<script>(.*?)</script>", script, re.DOTALL)
    command = [node, "--check", "-"] if path == "/docs" else [node, "--input-type=module", "--check", "-"]
    subprocess.run(command, input=script, text=True, check=True, timeout=PATIENCE)
