"""Runtimes that all tests of scripts share, as users share a server: one for JavaScript and JSON, one for Python."""

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
def script_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of compiled scripts, which all tests share."""
    return tmp_path_factory.mktemp("script-store")


@pytest.fixture(scope="session")
def script_pool(tokenizer: Path, script_store: Path) -> Iterator[RuntimePool]:  # noqa: F811
    limits = ("--limit", "max_init_time=10000", "--limit", "max_prepare_wait=600000")
    arguments = ("--store", str(script_store), "--wasm-max-step-time", "200", *limits)
    pool = RuntimePool(RuntimeConfig(str(tokenizer), extra_args=arguments), VOCAB_SIZE)
    yield pool
    pool.shutdown()


def runner(pool: RuntimePool, name: str) -> Run:
    return named(pool, Scripts(pool, "").upload(standard.load(name)))


def named(pool: RuntimePool, module: str) -> Run:
    """Return a function that runs scripts with the controller `module` of the runtime."""

    def run(source: str, *lines: str, prompt: str = "", **sampling: object) -> Scripts:
        scripts = Scripts(pool, module, lines)
        scripts.script(source, prompt, **sampling)
        return scripts

    return run


@pytest.fixture(scope="session")
def js(script_pool: RuntimePool) -> Run:
    return runner(script_pool, "jsctrl")


@pytest.fixture(scope="session")
def py_store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of compiled interpreters, which is kept after the tests because compiling is slow."""
    cache = getattr(request.config, "cache", None)  # its plugin can be turned off
    return tmp_path_factory.mktemp("py-store") if cache is None else Path(cache.mkdir("bridle-py-store"))


@pytest.fixture(scope="session")
def py_pool(tokenizer: Path, py_store: Path) -> Iterator[RuntimePool]:  # noqa: F811
    arguments = ("--store", str(py_store), "--wasm-max-step-time", "2000", "--limit", "max_prepare_wait=800000")
    config = RuntimeConfig(str(tokenizer), extra_args=(*arguments, "--limit", "max_init_time=10000"))
    pool = RuntimePool(config, VOCAB_SIZE)
    yield pool
    pool.shutdown()


@pytest.fixture(scope="session")
def py(py_pool: RuntimePool) -> Run:
    return named(py_pool, "pyctrl")
