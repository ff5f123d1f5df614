"""Tests of the application on a real Ray on this machine, with two engines of the demo model.

The first run installs Ray into a separate environment on top of this one."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.real_clients.environment import CONSTRAINTS, layered_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SCRIPT = Path(__file__).with_name("ray_script.py")
ROOT = Path(__file__).parents[2]
#: Nothing is told to Ray's makers, nothing is left in the user's folder, and workers are as urgent as everybody else.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}


def python_with_ray() -> Path:
    if importlib.util.find_spec("ray") is not None:
        return Path(sys.executable)
    pin = re.search(r"^ray==\S+$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert pin is not None
    return layered_python(pin[0].replace("ray==", "ray[serve]=="))


def test_two_engines_on_a_local_ray() -> None:
    source = SCRIPT.read_text()
    with tempfile.TemporaryDirectory(prefix="br-") as folder:  # Ray's sockets lie in it, so its name is short
        command = [str(python_with_ray()), str(SCRIPT), folder]
        own = os.environ | SETTINGS | {"TMPDIR": folder}  # its dashboard, which is killed, leaves sockets behind
        done = subprocess.run(command, text=True, capture_output=True, timeout=1700, env=own)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout.count(" ok\n") == source.count("\ndef check_") > 0
