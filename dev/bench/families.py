"""Survey of transformers' decoder architectures: which of them bridle serves, and why it refuses others.

Each architecture is tried with a tiny random checkpoint in a separate process with limits. With `--folder`, a run
continues where the run before it ended. With `--report docs/models.md`, the table on that page is rewritten.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridle.bench.control import print_table
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.errors import InvalidRequest
from dev.bench.family_trial import CRASHED, MULTIMODAL, REFUSED, SERVED, UNTRIED, WRONG, architectures, try_family
from dev.bench.named_models import write_named_table

if TYPE_CHECKING:
    from rich.console import Console

THREADS = 1
_SECONDS = 3.0  # of one architecture, for `MachineLimits.python`
_LIMIT_SECONDS = 180.0
_QUICK_SHARE = 10  # `--quick` tries one of this many architectures
_FILE = "families.json"
_BEGIN, _END = "<!-- families -->", "<!-- end of families -->"
#: Causes of refusals by a part of their messages; any other message is a separate cause.
_CAUSES = (
    ("encoder-decoder", "encoder-decoder"),
    ("recurrent", "recurrent layers, alone or next to attention"),
    ("convolution", "short convolutions"),
    ("index of its own", "sparse attention with an index"),
    ("chunks", "chunked attention"),
    ("cross attention", "cross attention to images"),
    ("both directions", "attention in both directions"),
    ("attention of its own", "attention code that bypasses transformers' attention interface"),
    ("its own attention that", "attention code that bypasses transformers' attention interface"),
    ("ALiBi", "ALiBi positions in a mask"),
    ("layers of type", "unsupported kinds of layers"),
    ("cannot run on text without images", "cannot answer without an image"),
    ("packed pass differs", "packing sequences into one batch changes results"),
    ("no class for its text", "no text class in transformers"),
    ("no language model under", "no text model in a place that bridle knows"),
)
_OTHER = "other reasons"


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each remaining architecture."""
    done = _read(settings.folder)
    return {name: limits.python(_SECONDS) for name in _wanted(settings) if name not in done}


def _wanted(settings: BenchSettings) -> list[str]:
    names = [f"{family}/{kind}" for family, kind in architectures()]
    names = names[::_QUICK_SHARE] if settings.quick else names
    return [name for name in names if not settings.parts or any(part in name for part in settings.parts)]


def _read(folder: Path | None) -> dict[str, list[str]]:
    path = None if folder is None else folder / _FILE
    found: dict[str, list[str]] = json.loads(path.read_text()) if path is not None and path.exists() else {}
    return found


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Try all remaining architectures, and print a table."""
    if settings.report is not None and (settings.quick or settings.parts):
        raise InvalidRequest("report needs all architectures: leave out --quick and --parts", "report")
    results = _read(settings.folder)
    for name in _wanted(settings):
        if name in results:
            continue
        with phases.part(name):
            results[name] = list(_try_apart(*name.split("/")))
        if settings.folder is not None:
            settings.folder.mkdir(parents=True, exist_ok=True)
            (settings.folder / _FILE).write_text(json.dumps(results, indent=1))
    rows = table_rows(results)
    print_table(console, "architectures", [{"state": a, "count": b, "families": c} for a, b, c in rows])
    if settings.report is not None:
        write_table(settings.report, rows)
        write_named_table(settings.report)
    return {"counts": dict(Counter(state for state, _ in results.values())), "results": results}


class _Printer:
    """Stands for the pipe to the parent: prints the result of a child process as its last line of output."""

    def send(self, result: tuple[str, str]) -> None:
        print("\n" + json.dumps(result), flush=True)


def _try_apart(family: str, kind: str) -> tuple[str, str]:
    """Try one architecture in a child process, which may crash or take too long."""
    with tempfile.TemporaryDirectory(prefix="bridle-families-") as folder:
        command = [sys.executable, "-m", "dev.bench.families", family, kind, folder]
        try:
            child = subprocess.run(  # noqa: S603 - this module itself, with names of families
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                timeout=_LIMIT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return CRASHED, f"no result after {_LIMIT_SECONDS:.0f} s"
        if child.returncode or not child.stdout.strip():
            return CRASHED, f"the process ended with status {child.returncode}"
        state, reason = json.loads(child.stdout.splitlines()[-1])
        return str(state), str(reason)


def cause_of(message: str) -> str:
    """Return the group of causes to which a refusal belongs."""
    return next((cause for part, cause in _CAUSES if part in message), _OTHER)


def table_rows(results: dict[str, list[str]]) -> list[tuple[str, str, str]]:
    """Return rows of results and causes, each with its number of architectures and their families. Families with images
    or sound are marked."""
    groups: dict[tuple[int, str], list[str]] = {}
    order = (SERVED, WRONG, CRASHED, UNTRIED, REFUSED)
    for name, (state, reason) in results.items():
        family, _, kind = name.partition("/")
        title = f"refused: {cause_of(reason)}" if state == REFUSED else state
        groups.setdefault((order.index(state), title), []).append(f"`{family}{'*' if kind == MULTIMODAL else ''}`")
    ordered = sorted(groups.items(), key=lambda each: (each[0][0], -len(each[1])))
    return [(title, str(len(families)), ", ".join(sorted(families))) for (_, title), families in ordered]


def write_table(page: Path, rows: list[tuple[str, str, str]]) -> None:
    """Replace the table between the two marks on a page."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    lines = ["| Result | Architectures | Families |", "| --- | --- | --- |"]
    lines += [f"| {title} | {count} | {families} |" for title, count, families in rows]
    page.write_text(f"{before}{_BEGIN}\n\n" + "\n".join(lines) + f"\n\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    try_family(sys.argv[1], sys.argv[2], sys.argv[3], _Printer())
