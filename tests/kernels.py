"""Common parts of the tests of Triton kernels: they check that Triton is installed, and run property tests."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.sources import ROOT

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton (pip install 'bridle-llm[fused]')")
_OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "--timeout", "900")


def check_properties(path: str) -> None:
    """Run a file of properties in Triton's interpreter. It runs in its own process, because Triton reads the variable
    when it is imported."""
    command = [sys.executable, "-m", "pytest", *_OPTIONS, path]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
