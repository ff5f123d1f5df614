"""Settings of the whole suite: hypothesis profiles, one thread per process, GPU tests skipped without a GPU.

The profile `ci` tries few examples from a fixed seed; `full` (BRIDLE_FULL=1, or BRIDLE_PROFILE=full) tries many.
Neither has a deadline: no test asserts on time. A request without a seed gets one that follows from the name of its
test, so a repeated test samples the same tokens. Other processes that a test starts do not assign seeds; their requests
carry seeds.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported anywhere
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches out
if "SSL_CERT_FILE" in os.environ:
    os.environ.setdefault("PIP_CERT", os.environ.pop("SSL_CERT_FILE"))
os.environ["SSL_CERT_DIR"] = os.path.join(os.devnull, "certificates")  # each client would read the system's: 25 ms
os.environ["BRIDLE_MODELS"] = os.path.join(os.devnull, "models")  # what the user has pulled changes no test
os.environ.setdefault("BRIDLE_KV_STORE", "off")  # a server of a test finds no KV of another one
os.environ.setdefault("BRIDLE_CONTROL_PREPARE", "false")  # nobody compiles interpreters in the background

import gc
import inspect
import logging
import random
import signal
from collections.abc import Iterable, Iterator

import httpx
import pytest
import structlog
from hypothesis import HealthCheck, settings

from bridle.engine.spec_decode import speculation
from bridle.serving.requests import request_builder
from tests.covering import mark_the_rest
from tests.waiting import PATIENCE

_SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile("ci", max_examples=10, derandomize=True, deadline=None, suppress_health_check=_SLOW_IS_FINE)
settings.register_profile(
    "full", max_examples=200, derandomize=False, deadline=None, suppress_health_check=_SLOW_IS_FINE
)
IS_FULL = os.environ.get("BRIDLE_FULL", "") not in ("", "0")
settings.load_profile(os.environ.get("BRIDLE_PROFILE", "full" if IS_FULL else "ci"))


def examples(number: int, quick: int | None = None) -> int:
    """Return a number of examples for a test that needs more than its profile tries. All of `number` run in the full
    profile, otherwise `quick` or a third."""
    return number if IS_FULL else quick or max(number // 3, 5)


# A shell starts what runs in its background without Ctrl-C. Tests send it, also to processes that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# As in `bridle.logs`. The default of structlog shows code and variables of each call in colours, which takes seconds.
structlog.get_config()["processors"][-1].exception_formatter = structlog.dev.plain_traceback

# An answer that takes longer than httpx's five seconds is no fault on a busy machine.
_timeout = inspect.signature(httpx.Client).parameters["timeout"].default
_timeout.connect = _timeout.read = _timeout.write = _timeout.pool = PATIENCE

pytest_plugins = ["tests.leftovers", "tests.asking"]

_seeds = random.Random()
request_builder.new_seed = lambda: _seeds.getrandbits(53)


@pytest.fixture(autouse=True)
def _draws_as_before(request: pytest.FixtureRequest) -> None:
    _seeds.seed(request.node.nodeid)


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """Restore the logging configuration after each test, because `serve` changes it."""
    root = logging.getLogger()
    loggers = (root, logging.getLogger("bridle"), logging.getLogger("uvicorn"))
    handlers, levels = list(root.handlers), [logger.level for logger in loggers]
    yield
    root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        if logger.level != level:  # setting a level clears the caches of all loggers
            logger.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture
def obeyed_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the number of draft tokens as requested, however long the steps take on this machine."""
    monkeypatch.setattr(speculation, "ENOUGH_STEPS", 1 << 60)


gc.disable()  # until the tests are collected: imports leave little garbage, and looking for it takes a tenth of them


def pytest_collection_finish() -> None:
    """Exclude the objects that exist after test collection from garbage collections, because each load of a model runs
    one."""
    gc.freeze()  # with the little garbage that exists now, because a collection takes a second
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    mark_the_rest(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or _has_gpu():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
