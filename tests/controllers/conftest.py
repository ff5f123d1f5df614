"""One control runtime for all scripts in JavaScript and JSON, as users share a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bridle.aici.client import RuntimeConfig, RuntimePool
from bridle.controllers import standard
from tests.aici.conftest import VOCAB_SIZE, tokenizer  # noqa: F401 -- a fixture
from tests.controllers.pykit import Scripts

#: Runs a script to its end over a model that knows some lines; gives everything that happened.
Run = Callable[..., Scripts]


@pytest.fixture(scope="session")
def script_pool(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuntimePool]:  # noqa: F811
    store = tmp_path_factory.mktemp("script-store")
    arguments = ("--store", str(store), "--wasm-max-step-time", "200", "--limit", "max_init_time=10000")
    pool = RuntimePool(RuntimeConfig(str(tokenizer), extra_args=arguments), VOCAB_SIZE)
    yield pool
    pool.shutdown()


def runner(pool: RuntimePool, name: str) -> Run:
    module = Scripts(pool, "").upload(standard.load(name))

    def run(source: str, *lines: str, prompt: str = "", **sampling: object) -> Scripts:
        scripts = Scripts(pool, module, lines)
        scripts.script(source, prompt, **sampling)
        return scripts

    return run


@pytest.fixture(scope="session")
def js(script_pool: RuntimePool) -> Run:
    return runner(script_pool, "jsctrl")
