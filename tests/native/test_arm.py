"""The kernels for Arm, run by an emulator: what they give is what those for AVX2 give, which have as many lanes."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path

import pytest

from bridle.native.targets import SOURCES, TARGETS
from bridle.native.zig import zig_cc
from tests.native.test_sanitized import PROGRAM

FLAGS = ("-static", "-std=gnu11", "-O2", "-ffp-contract=off", "-w", f"-I{SOURCES}")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


def figures(name: str, system: str, folder: Path, *before: str) -> list[list[str]]:
    """The lines of the program for that object, which is linked to run without libraries."""
    (target,) = [each for each in TARGETS if each.name == name]
    flags = target.flags[2:]  # those before name the C library of shipped objects
    program = folder / name
    zig_cc(["-target", system, *flags, *FLAGS, "-o", program, PROGRAM, "-lpthread", "-lm"])
    told = subprocess.run([*before, program, "figures"], capture_output=True, text=True, check=True).stdout
    return [line.split() for line in told.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(EMULATOR is None, reason="no qemu-aarch64 (Debian: qemu-user-static)")
def test_kernels_for_arm_give_what_those_for_avx2_give(tmp_path: Path) -> None:
    assert EMULATOR is not None
    arm = figures("neon-dotprod", "aarch64-linux-musl", tmp_path, EMULATOR, "-cpu", "max")
    avx2 = figures("avx2", "x86_64-linux-musl", tmp_path)
    assert [line[:2] for line in arm] == [line[:2] for line in avx2] and arm[-1] == ["all", "ran"]
    kinds = {line[0] for line in arm}
    assert kinds == {"linear", "layers", "told", "drawn", "totals", "all"}
    for ours, theirs in zip(arm[:-1], avx2[:-1], strict=True):
        exact = ours[0] in ("told", "drawn")
        for have, want in zip(map(float, ours[2:]), map(float, theirs[2:]), strict=True):
            assert have == want if exact else math.isclose(have, want, rel_tol=1e-4, abs_tol=1e-3), (ours, theirs)
