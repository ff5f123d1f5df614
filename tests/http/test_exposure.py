"""A server without keys is for one user: other machines cannot reach it unless the operator allows that."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from bridle.errors import InvalidRequest
from bridle.http import ServeSettings, serve
from bridle.http.server.listening import bind
from bridle.http.server.run import check_exposure
from bridle.serving import LoadedModel


def never(settings: ServeSettings) -> LoadedModel:
    raise AssertionError("the model was loaded all the same")


@pytest.fixture
def own_logs() -> Iterator[None]:
    """Restore logging after the test, because `serve` configures logging for its process."""
    loggers = [logging.getLogger(name) for name in (None, "bridle", "uvicorn")]
    before = [(logger, logger.handlers[:], logger.level) for logger in loggers]
    yield
    for logger, handlers, level in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.usefixtures("own_logs")
def test_everywhere_needs_keys_or_a_word() -> None:
    with pytest.raises(InvalidRequest, match="bridle keys add") as refused:
        serve(ServeSettings(host="0.0.0.0", port=0), load=never)
    assert "--no-auth" in str(refused.value) and refused.value.param == "host"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_loopback_is_fine(host: str) -> None:
    with contextlib.closing(bind(host, 0)) as listener:
        check_exposure(listener, ServeSettings(host=host, port=0))


def test_keys_or_a_word_open_the_door(tmp_path: Path) -> None:
    with contextlib.closing(bind("0.0.0.0", 0)) as listener:
        check_exposure(listener, ServeSettings(no_auth=True))
        check_exposure(listener, ServeSettings(keys=tmp_path / "keys.db"))


def test_the_server_does_without_the_packages_of_the_runtime() -> None:
    """Importing the application, the commands and the Python API imports none of the control runtime's packages."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('posix_ipc', 'wasmtime', 'llguidance')));"
        "import bridle.http.server.run, bridle.cli.app, bridle.serving; from bridle import LLM"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
