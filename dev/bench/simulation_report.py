"""The page about simulations: fills in its tables between marks in the text, and writes a folder with plots and
figures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
Run = dict[str, Any]

_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write_report(figures: Figures, page: Path) -> None:
    """Write the figures of the finished parts, and their plots. A missing page is created."""
    from dev.bench.simulation_plots import draw_all

    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    draw_all(figures, folder)
    text = page.read_text(encoding="utf-8") if page.exists() else _blank()
    page.write_text(fill_in(text, figures), encoding="utf-8")


def fill_in(text: str, figures: Figures) -> str:
    """Return the page's text with its tables filled in from the figures."""

    def replaced(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in figures:
            return match.group()
        return f"{begin}\n{_scale_of(name, figures['scale'])}\n\n{TABLES[name](figures)}\n\n{end}"

    return _MARKED.sub(replaced, text)


def _blank() -> str:
    return "# Simulation\n\n" + "\n".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in TABLES)


def _scale_of(name: str, scale: dict[str, Any]) -> str:
    """Return a sentence about the scale of the simulation in a table."""
    kind = name if name in ("checked", "large") else "swept"
    size = f"{scale[f'{kind}_replicas']:,} replicas and {scale[f'{kind}_requests']:,} requests in each run"
    return f"{size}." if name == "load" else f"{size}, {scale['usual_rate']:g} requests a second and replica."


# -- tables ----------------------------------------------------------------------------------------------------


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _usual_cells(run: Run) -> list[str]:
    ttft, latency = run["ttft"], run["latency"]
    return [
        *(_seconds(ttft[name]) for name in ("p50", "p99", "p99.9")),
        *(_seconds(latency[name]) for name in ("p50", "p99")),
        _share(run["hit_rate"]),
        _share(run["busy"]),
        _share(run["busy_spread"]),
    ]


_USUAL = ("TTFT p50, s", "p99", "p99.9", "latency p50, s", "p99", "hit rate", "busy", "spread")


def _checked(figures: Figures) -> str:
    """Return a table of the real engine, its model, and the difference of both."""
    rows = []
    by_policy: dict[str, dict[str, Run]] = {}
    for run in figures["checked"]:
        by_policy.setdefault(run["policy"], {})[run["core"]] = run
        rows.append([run["policy"], run["core"], *_usual_cells(run), f"{run['cpu_seconds']:.0f}"])
    apart = [
        [policy, "apart by", *_deviations(runs["quick"], runs["engine"]), ""]
        for policy, runs in by_policy.items()
        if len(runs) == 2
    ]
    order = [row for policy in by_policy for row in (*rows, *apart) if row[0] == policy]
    return _table(["routing", "replicas", *_USUAL, "run, CPU s"], order)


def _deviations(quick: Run, engine: Run) -> list[str]:
    """Return the deviations of the model from the engine: relative for times, in percentage points for shares."""
    pairs = [
        *((quick["ttft"][name], engine["ttft"][name]) for name in ("p50", "p99", "p99.9")),
        *((quick["latency"][name], engine["latency"][name]) for name in ("p50", "p99")),
    ]
    shares = [100 * (quick[name] - engine[name]) for name in ("hit_rate", "busy", "busy_spread")]
    return [
        *(f"{100 * (one / other - 1):+.1f} %" for one, other in pairs),
        *(f"{difference:+.1f}" for difference in shares),
    ]


def _load(figures: Figures) -> str:
    return _table(
        ["requests/s and replica", "routing", *_USUAL],
        ([f"{run['offered']:g}", run["policy"], *_usual_cells(run)] for run in figures["load"]),
    )


def _losses(figures: Figures) -> str:
    return _table(
        ["losses/h and replica", "routing", "lost", *_USUAL],
        (
            [f"{run['losses_per_hour']:g}", run["policy"], str(run["num_losses"]), *_usual_cells(run)]
            for run in figures["losses"]
        ),
    )


def _large(figures: Figures) -> str:
    return _table(
        ["routing", "answered", "lost", *_USUAL, "run, CPU s"],
        (
            [
                run["policy"],
                f"{run['num_answered']:,}",
                str(run["num_losses"]),
                *_usual_cells(run),
                f"{run['cpu_seconds']:.0f}",
            ]
            for run in figures["large"]
        ),
    )


TABLES: dict[str, Callable[[Figures], str]] = {
    "checked": _checked,
    "load": _load,
    "losses": _losses,
    "large": _large,
}
