"""Tests of the Arm kernels in an emulator: their results equal those of AVX2, which has as many lanes. Sanitizers find
no undefined behaviour and no access outside of their memory."""

from __future__ import annotations

import math
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from bridle.cpu_kernels.isa_targets import SOURCES, TARGETS
from dev.cpu_kernels.zig import zig_cc
from tests.cpu_kernels.blocks import PROGRAM
from tests.leftovers import kept_folder

FLAGS = ("-static", "-std=gnu11", "-O2", "-ffp-contract=off", "-w", f"-I{SOURCES}")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
ARM = [target.name for target in TARGETS if target.machine == "aarch64"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(EMULATOR is None, reason="no qemu-aarch64 (Debian: qemu-user-static)"),
]


@cache
def program(name: str, *flags: str) -> Path:
    """Build the test program for this Arm target, linked to run without shared libraries."""
    (target,) = [each for each in TARGETS if each.name == name]
    system = f"{target.machine}-linux-musl"
    made = kept_folder("bridle-arm-") / name
    # The first two flags of a target name the C library of shipped objects.
    zig_cc(["-target", system, *target.flags[2:], *FLAGS, *flags, "-o", made, PROGRAM, "-lpthread", "-lm"])
    return made


def run(made: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    before = [EMULATOR or "", "-cpu", "max"] if made.name in ARM else []
    return subprocess.run([*before, made, *arguments], capture_output=True, text=True, check=False)


def figures(name: str) -> list[list[str]]:
    done = run(program(name), "figures")
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", ARM)
def test_kernels_for_arm_give_what_those_for_avx2_give(name: str) -> None:
    arm, avx2 = figures(name), figures("avx2")
    assert [line[:2] for line in arm] == [line[:2] for line in avx2] and arm[-1] == ["all", "ran"]
    kinds = {line[0] for line in arm}
    assert kinds == {"linear", "layers", "told", "drawn", "totals", "places", "allowed", "all"}
    for ours, theirs in zip(arm[:-1], avx2[:-1], strict=True):
        exact = ours[0] in ("told", "drawn", "places", "allowed")
        for have, want in zip(map(float, ours[2:]), map(float, theirs[2:]), strict=True):
            assert have == want if exact else math.isclose(have, want, rel_tol=1e-4, abs_tol=1e-3), (ours, theirs)


def test_both_objects_for_arm_give_the_same_bits() -> None:
    """The two Arm objects sum one or two rows at once: sums of integers are exact, and sums of groups keep their
    order."""
    one, other = map(figures, ARM)
    assert one == other


@pytest.mark.parametrize("name", ARM)
def test_nothing_in_them_is_undefined(name: str) -> None:
    done = run(program(name, "-fsanitize=undefined", "-fsanitize-trap=undefined"))
    assert (done.returncode, done.stdout) == (0, "all ran\n"), done.stderr[-2000:]


@pytest.mark.parametrize("name", ARM)
def test_they_stay_between_the_fences_of_their_memory(name: str) -> None:
    made = program(name, "-DFENCED")
    done = run(made)
    assert (done.returncode, done.stdout) == (0, "all ran\n"), done.stderr[-2000:]
    assert run(made, "beyond").returncode != 0, "what reaches beyond is caught"
