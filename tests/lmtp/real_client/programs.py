"""Programs for the original LMQL client, which run against bridle's server."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dev.bench.lmql import CLIENT_PACKAGES, lmql_python
from tests.sources import ROOT


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python interpreter of a virtual environment with LMQL."""
    kept = os.environ.get("BRIDLE_LMQL_ENV")
    return lmql_python(Path(kept) if kept else tmp_path_factory.mktemp("lmql"), packages=CLIENT_PACKAGES)


@contextlib.contextmanager
def serving(*words: str) -> Iterator[str]:
    """`HOST:PORT` of a server that the given command line starts for the demo model."""
    command = [sys.executable, "-m", "bridle", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        try:
            lines = (line for line in server.stdout if "://" in line)
            yield next(lines).partition("://")[2].partition("/")[0]
        finally:
            server.terminate()


def run_program(python: Path, folder: Path, program: Path, *words: str) -> dict[str, Any]:
    """Run a program with LMQL, and return the JSON in its last line of output."""
    own = {"HOME": str(folder), "TMPDIR": str(folder)}  # it leaves compiled queries behind
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **own}
    done = subprocess.run(
        [str(python), str(program), *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
