"""The instruction-set features of this processor, by name. The features decide which kernels are used, and benchmark
reports must include them. Feature names are the names that Linux uses (`avx512_vnni`, `asimddp`). This module needs
only the standard library.
"""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path

#: The features that matter for arithmetic on a CPU, from general to special; other features are not reported.
TOLD = (
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimdhp",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
)
_CPUINFO = Path("/proc/cpuinfo")
#: Linux's names for Apple's features.
_APPLE = {"FEAT_DotProd": "asimddp", "FEAT_I8MM": "i8mm", "FEAT_FP16": "asimdhp", "FEAT_BF16": "bf16"}


@cache
def cpu_features() -> frozenset[str]:
    """Return the features in `TOLD` that this processor and its operating system support; empty if they are unknown."""
    if _CPUINFO.exists():
        return features_in(_CPUINFO.read_text(encoding="utf-8", errors="replace"))
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return frozenset({"asimd", *_apple_features()})
    return frozenset()


def features_in(cpuinfo: str) -> frozenset[str]:
    """Return the features that all processors listed in the text of `/proc/cpuinfo` have."""
    lists = [
        line.partition(":")[2].split()
        for line in cpuinfo.splitlines()
        if line.partition(":")[0].strip() in ("flags", "Features")
    ]
    return frozenset(TOLD).intersection(*lists) if lists else frozenset()


def cpu_name() -> str:
    """Return the processor's model name, or its architecture if the name is unknown."""
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_cpu() -> dict[str, object]:
    """Return the fields `cpu` and `cpu_features` of benchmark reports."""
    return {"cpu": cpu_name(), "cpu_features": [name for name in TOLD if name in cpu_features()]}


def _apple_features() -> set[str]:
    found = set()
    for name, ours in _APPLE.items():
        command = ["/usr/sbin/sysctl", "-n", f"hw.optional.arm.{name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if done.stdout.strip() == "1":
            found.add(ours)
    return found
