"""Tests of the kernels under the address and undefined-behaviour sanitizers, for many shapes in memory of exact
size."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from bridle.cpu_kernels.features import cpu_features
from bridle.cpu_kernels.isa_targets import SOURCES, IsaTarget
from bridle.cpu_kernels.library import fitting
from dev.cpu_kernels.zig import zig_cc
from tests.cpu_kernels.blocks import PROGRAM

TARGETS = list(fitting(platform.system(), platform.machine(), cpu_features()))
COMMON = ("-std=gnu11", "-O1", "-g", "-ffp-contract=off", "-w", f"-I{SOURCES}")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_no_undefined_behaviour(target: IsaTarget, tmp_path: Path) -> None:
    out = tmp_path / "undefined"
    flags = ("-fsanitize=undefined", "-fno-sanitize-recover=undefined")
    zig_cc([*target.flags, *COMMON, *flags, "-o", out, PROGRAM, "-lpthread", "-lm"])
    done = subprocess.run([out], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "all ran\n"), done.stderr[-2000:]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_nothing_beside_its_memory_is_touched(target: IsaTarget, tmp_path: Path) -> None:
    """Zig's compiler instruments the kernels' memory accesses, and the system's gcc links the AddressSanitizer
    library."""
    linker = shutil.which("gcc")
    if linker is None:
        pytest.skip("no gcc here, whose libasan is needed")
    made, out = tmp_path / "addresses.o", tmp_path / "addresses"
    zig_cc([*target.flags, *COMMON, "-fsanitize=address", "-fno-sanitize=undefined", "-c", "-o", made, PROGRAM])
    linked = subprocess.run(
        [linker, "-fsanitize=address", "-o", out, made, "-lpthread", "-lm"], capture_output=True, text=True, check=False
    )
    if linked.returncode:
        pytest.skip(f"gcc has no libasan: {linked.stderr[-200:]}")
    done = subprocess.run([out], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "all ran\n"), done.stderr[-2000:]
    caught = subprocess.run([out, "beyond"], capture_output=True, text=True, check=False)
    assert caught.returncode and "heap-buffer-overflow" in caught.stderr
