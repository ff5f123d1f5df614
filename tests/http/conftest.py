"""Servers that the tests of a module share, because starting a server is slow. No test may leave state behind in a
server."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from bridle.config import ModelConfig
from bridle.serving import load_model
from bridle.serving.controller_runtime import ControlSettings
from tests.http.browser import chromium, opened
from tests.http.harness import saying, scripted_model, served
from tests.http.playground_kit import WEB
from tests.waiting import PATIENCE

REPLY = "Hello there, é and the end."


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Yield the address of a server whose model always says `REPLY`."""
    with served(scripted_model(next_token=saying(REPLY))) as url:
        yield url


@pytest.fixture(scope="module")
def random_server() -> Iterator[str]:
    """Yield the address of a server whose model computes several tokens' probabilities from a hash of the text."""
    with served(scripted_model(spread=16)) as url:
        yield url


@pytest.fixture(scope="session")
def demo_server() -> Iterator[str]:
    """Yield the address of a server with the demo model, for tests that need a trained model."""
    with served(load_model(ModelConfig("demo", num_blocks=512))) as url:
        yield url


@pytest.fixture
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def random_client(random_server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=random_server + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as made:
        yield made


@pytest.fixture(scope="module")
def playground_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a server with the demo model and a control runtime."""
    control = ControlSettings("on", store=tmp_path_factory.mktemp("store"))
    with served(load_model(ModelConfig("demo", num_blocks=1024), control=control)) as made:
        yield made


@pytest.fixture
def page(browser: Any, playground_url: str) -> Iterator[Any]:
    """Yield the playground's page in a browser without stored data."""
    with opened(browser, playground_url) as made:
        yield made


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the source of axe-core, which checks accessibility, from the packages that the page is built with."""
    packages = WEB / "node_modules"
    if not (packages / "axe-core").is_dir():
        npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("axe")
        if npm is None:
            pytest.skip("no npm here")
        for name in ("package.json", "package-lock.json"):
            shutil.copy(WEB / name, folder)
        install = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        fetched = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
        if fetched.returncode != 0:
            pytest.skip(f"the packages cannot be fetched here: {fetched.stderr.strip()[-200:]}")
        packages = folder / "node_modules"
    return (packages / "axe-core/axe.min.js").read_text(encoding="utf-8")
