"""Parts of the validation of a GPU that are other programs. They are the tests marked `gpu`, alone and under
compute-sanitizer, and Nsight Compute's hardware counters of the attention kernels.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Figures = Iterator[dict[str, Any]]
_TESTS = ("tests/gpu", "tests/model", "tests/lora")
#: Without a GPU a few tests stand for those that need one.
_QUICK = ("tests/gpu", "-m", "not gpu", "-k", "kernel_gives")
#: One type (bfloat16) of each kernel of attention: the checker makes each access a hundred times slower.
_CHECKED = ("tests/gpu", "-m", "gpu", "-k", "kernel_gives and paged and dtype1")
_KERNELS = "regex:attend_part|attend_works|attend_whole|join_parts"
_METRICS = {
    "gpu__time_duration.sum": "nanoseconds",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "launch__registers_per_thread": "registers",
}
#: Before a part's limit, so that it tells what it has.
_BEFORE = 5.0


def laws(folder: Path, seconds: float, *, quick: bool) -> Figures:
    """Run the tests marked `gpu`. A test worker whose device was lost ends, and another worker replaces it."""
    report = folder / "junit.xml"
    chosen = _QUICK if quick else (*_TESTS, "-m", "gpu", "-n", "8", "--dist", "worksteal")
    options = ("-q", "-p", "no:cacheprovider", "-p", "scripts.card.sound", f"--junitxml={report}")
    code = _run((sys.executable, "-m", "pytest", *options, *chosen), seconds)
    if not report.exists():
        yield {"what": "tests", "failed": f"pytest made no report (exit status {code})"}
        return
    counts, names = _read(report)
    yield {"what": "tests", **counts}
    for name in names:
        yield {"what": "test", "failed": name}
    if not counts["passed"]:
        yield {"what": "tests", "failed": "none passed"}


def _read(report: Path) -> tuple[dict[str, int], list[str]]:
    """Return the numbers of tests that passed, failed and were skipped, and the names of those that failed."""
    cases = list(ET.parse(report).getroot().iter("testcase"))
    failed = [each for each in cases if each.find("failure") is not None or each.find("error") is not None]
    skipped = sum(each.find("skipped") is not None for each in cases)
    names = [f"{each.get('classname')}::{each.get('name')}" for each in failed]
    return {"passed": len(cases) - len(failed) - skipped, "failed_tests": len(failed), "skipped": skipped}, names


def sanitizer(seconds: float, *, quick: bool) -> Figures:
    """Run the kernels' tests under compute-sanitizer, which reports each access outside of allocated memory as a
    failure."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        yield _missing("compute-sanitizer", quick=quick)
        return
    options = ("--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all")
    pytest = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *_CHECKED)
    code = _run((program, *options, *pytest), seconds)
    yield {
        "what": "compute-sanitizer",
        "failed": None if code == 0 else f"exit status {code}; log.txt has what it said",
    }


def counters(seconds: float, *, quick: bool) -> Figures:
    """Yield the figures of one launch of each attention kernel: time, shares of the peak speeds, occupancy and
    registers."""
    program = shutil.which("ncu")
    if program is None:
        yield _missing("ncu", quick=quick)
        return
    options = ("--csv", "--clock-control", "none", "--launch-count", "40", "-k", _KERNELS)
    child = (sys.executable, "-m", "scripts.card.child", "attention", "--seconds", f"{seconds / 2:.0f}")
    command = (program, *options, "--metrics", ",".join(_METRICS), *child)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=seconds - _BEFORE)
    found = read_counters(done.stdout)
    yield from found
    if not found:
        yield {"what": "counters", "failed": f"ncu read none (exit status {done.returncode})"}


def read_counters(text: str) -> list[dict[str, Any]]:
    """Return the launches in the CSV table of ncu, in which each metric of a launch has its own line."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if row.get("Metric Name") in _METRICS:
            launch = launches.setdefault(row["ID"], {"what": "counters", "kernel": row["Kernel Name"]})
            launch[_METRICS[row["Metric Name"]]] = float(row["Metric Value"].replace(",", ""))
    return list(launches.values())


def _missing(program: str, *, quick: bool) -> dict[str, Any]:
    """Return the record of a missing program of the GPU's tool kit, which is no failure in quick runs without a GPU."""
    return {"what": program, ("left_out" if quick else "failed"): f"there is no {program}"}


def _run(command: Sequence[str], seconds: float) -> int | str:
    """Run a command; return its exit status. Its output goes to the output of this process."""
    try:
        return subprocess.run(command, check=False, timeout=max(seconds - _BEFORE, 1.0)).returncode
    except subprocess.TimeoutExpired:
        return "none: it was ended"
