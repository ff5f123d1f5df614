"""Runs the parts of the validation of a GPU, each in its own process group, which is ended at the part's time limit.

This process imports only the standard library, because a part may kill its own process or make the device unusable for
it. Lines of JSON on a part's standard output are copied to `gpu.jsonl` and flushed. All its other output goes to
`log.txt`. A table of all parts is printed last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from scripts.card.parts import DEEP, FIRST, WHEELS_SECONDS, Part, chosen

ROOT = Path(__file__).resolve().parents[2]
FIGURES, LOG = "gpu.jsonl", "log.txt"
#: Under this a part is not begun. Seconds are kept for the table.
LEAST, _RESERVE = 5.0, 3.0
#: Between the signals that ask a group to end and that kill it.
_GRACE = 3.0
#: Limits of a toy, as a share of those on a GPU.
_QUICK_SHARE = 4.0
#: A part's last lines that are told where it died, and characters of a failure in the table.
_TAIL, _WIDTH = 2_000, 100


@dataclass(slots=True)
class Outcome:
    """Outcome of one part: `state` is ok, failed, died, late or left out. `failures` describe unexpected results."""

    part: str
    state: str = "ok"
    seconds: float = 0.0
    num_figures: int = 0
    failures: list[str] = field(default_factory=list)

    def take(self, figure: Mapping[str, Any]) -> None:
        """Count a figure; it is a failure if it has an error, or if something was not computed on the device."""
        self.num_figures += 1
        for key in ("error", "failed"):
            if figure.get(key):
                self.failures.append(str(figure[key]))


class Report:
    """The report of a run: files in one folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._figures = (folder / FIGURES).open("a", encoding="utf-8")
        self.log = (folder / LOG).open("ab+", buffering=0)

    def tell(self, part: str, figure: Mapping[str, Any]) -> None:
        """Write a figure as one line at once, to standard output and to the file of figures."""
        line = json.dumps({"part": part, **figure})
        print(line, flush=True)
        self._figures.write(line + "\n")
        self._figures.flush()
        os.fsync(self._figures.fileno())

    def close(self) -> None:
        self._figures.close()
        self.log.close()


def run_part(part: Part, argv: Sequence[str], seconds: float, report: Report, env: Mapping[str, str]) -> Outcome:
    """Run one part for at most `seconds`."""
    outcome, began = Outcome(part.name), time.monotonic()
    report.log.write(f"== {part.name}\n".encode())
    start = report.log.tell()
    process = subprocess.Popen(
        argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=report.log, start_new_session=True
    )
    ended = threading.Event()
    watch = threading.Timer(seconds, _end_late, (process, ended))
    watch.start()
    assert process.stdout is not None
    _copy(process.stdout, report, outcome)
    code = process.wait()
    watch.cancel()
    _kill(process.pid)  # what it started may outlive it
    outcome.seconds = time.monotonic() - began
    if ended.is_set():
        outcome.state = "late"
        outcome.failures.append(f"ended after {seconds:.0f} s")
    elif code:
        outcome.state = "died"
        outcome.failures.append(_how(code))
    elif outcome.failures or not outcome.num_figures:
        outcome.state = "failed"
        outcome.failures = outcome.failures or ["it told nothing"]
    if outcome.state in ("died", "late"):
        report.log.seek(start)
        tail = report.log.read()[-_TAIL:].decode(errors="replace")
        report.tell(part.name, {"died": outcome.failures[-1], "stderr_tail": tail})
    return outcome


def _copy(lines: IO[bytes], report: Report, outcome: Outcome) -> None:
    """Copy a part's output while the part writes it. A line that is not a JSON object was printed by a library, and
    goes to the log."""
    for line in lines:
        try:
            figure = json.loads(line)
        except ValueError:
            figure = None
        if isinstance(figure, dict):
            outcome.take(figure)
            report.tell(outcome.part, figure)
        else:
            report.log.write(line)


def _end_late(process: subprocess.Popen[bytes], ended: threading.Event) -> None:
    ended.set()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    _kill(process.pid)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def run_all(
    parts: Sequence[Part],
    command: Callable[[Part, float], Sequence[str]],
    seconds: float,
    report: Report,
    env: Mapping[str, str],
) -> list[Outcome]:
    """Run the parts one after the other while there is time. `command` returns the command line of a part with a time
    limit."""
    end, outcomes = time.monotonic() + seconds - _RESERVE, []
    for part in parts:
        most = min(part.seconds, end - time.monotonic())
        if most < LEAST:
            report.tell(part.name, {"left_out": "no time is left"})
            outcomes.append(Outcome(part.name, "left out", failures=["no time is left"]))
        else:
            outcomes.append(run_part(part, part.argv or command(part, most), most, report, env))
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the table of all parts, with one line for each part."""
    lines = [f"{'part':<12}{'state':<10}{'seconds':>8}{'figures':>9}  failures"]
    for each in outcomes:
        said = "; ".join(" ".join(failure.split())[:_WIDTH] for failure in each.failures[:3])
        more = f" (and {len(each.failures) - 3} more)" if len(each.failures) > 3 else ""
        lines.append(f"{each.part:<12}{each.state:<10}{each.seconds:>8.1f}{each.num_figures:>9}  {said}{more}".rstrip())
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run the parts; return 0 if all of them succeeded."""
    options = _parser().parse_args(arguments)
    try:
        parts = chosen(DEEP if options.deep else FIRST, options.part)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    report, began = Report(options.out), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bridle-card-") as site:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([site, str(ROOT)]), "PYTHONUNBUFFERED": "1"}
        outcomes = _install(options.wheels, Path(site), report, env)
        left = options.seconds - (time.monotonic() - began)
        if options.quick:  # on a machine that others use as well
            parts = [replace(part, seconds=_QUICK_SHARE * part.seconds) for part in parts]
        outcomes += run_all(parts, lambda part, most: _child(part, most, options), left, report, env)
    report.close()
    print(table(outcomes))
    return int(any(each.state != "ok" for each in outcomes))


def _install(wheels: Path | None, site: Path, report: Report, env: Mapping[str, str]) -> list[Outcome]:
    """Install the wheels of a folder into `site`, a folder that precedes the other packages on the import path of
    parts."""
    if wheels is None:
        return []
    files = sorted(str(path.resolve()) for path in wheels.glob("*.whl"))
    if not files:
        report.tell("pip", {"failed": f"{wheels} has no wheels"})
        return [Outcome("pip", "failed", failures=[f"{wheels} has no wheels"])]
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir")
    told = f"import json; print(json.dumps({{'wheels': {len(files)}}}))"
    script = f"import subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=sys.stderr); {told}"
    argv = (sys.executable, "-c", script, *pip, "--upgrade", "--target", str(site), *files)
    return [run_part(Part("pip", WHEELS_SECONDS), argv, WHEELS_SECONDS, report, env)]


def _child(part: Part, seconds: float, options: argparse.Namespace) -> list[str]:
    quick = ["--quick"] if options.quick else []
    folder = str(options.out.resolve())
    return [
        sys.executable,
        "-m",
        "scripts.card.child",
        part.name,
        "--seconds",
        f"{seconds:.0f}",
        "--out",
        folder,
        *quick,
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/card-run", description="Validate bridle on a GPU.")
    parser.add_argument("--seconds", type=float, default=570.0, help="time for all parts. Default: 570.")
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu.jsonl, log.txt and junit.xml")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install for the parts")
    parser.add_argument("--part", action="append", default=[], help="run this part alone (may be repeated)")
    parser.add_argument("--deep", action="store_true", help="run peers, compute-sanitizer and hardware counters")
    parser.add_argument("--quick", action="store_true", help="a toy, on the CPU if there is no GPU, to try the command")
    return parser
