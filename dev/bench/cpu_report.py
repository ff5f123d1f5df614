"""Tables and a plot of `bridle bench cpu`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dev.bench.cpu_limits import CpuLimits
from dev.bench.cpu_parts import BenchPart
from dev.bench.cpu_race import CpuFigure
from dev.bench.plots import pyplot

if TYPE_CHECKING:
    from rich.console import Console

_HEADINGS = ("", "tok/s", "median", "x", "x CPU", "CPU ms/tok", "limit")


def print_race(console: Console, part: BenchPart, figures: Sequence[CpuFigure]) -> None:
    """Print a table of one part."""
    from rich.table import Table

    assert part.case is not None
    case = part.case
    shown = f"{case.batch} of {case.context} tokens" if case.kind == "decode" else f"a prompt of {case.context}"
    table = Table(
        title=f"{part.model}, {case.kind}: {shown}",
        caption="x: times the first, by the clock and in CPU time; limit: share of what memory or arithmetic allow",
    )
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for f in figures:
        ratios = ("-" if ratio is None else f"{ratio:.2f}" for ratio in (f.ratio, f.cpu_ratio))
        speeds = (f"{f.tokens_per_second:.1f}", f"{f.median_tokens_per_second:.1f}")
        table.add_row(f.peer, *speeds, *ratios, f"{f.cpu_seconds_per_token * 1e3:.2f}", f"{f.limit_share:.0%}")
    console.print(table)


def print_limits(console: Console, limits: CpuLimits) -> None:
    """Print the machine's limits, measured in the same minute as the figures."""
    console.print(
        f"limits: {limits.bandwidth / 1e9:.1f} GB/s read, {limits.operations / 1e9:.0f} 8-bit GOP/s, "
        f"{limits.float_operations / 1e9:.0f} float32 GFLOP/s"
    )


def draw(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot decoding speed by batch size, with a panel for each model and context. Raises `UnsupportedFeature` without
    matplotlib."""
    plots = pyplot()
    decoding = [row for record in records for row in record.get("figures", ()) if row["kind"] == "decode"]
    panels = sorted({(row["model"], row["context"]) for row in decoding})
    drawing, axes = plots.subplots(1, max(len(panels), 1), figsize=(5 * max(len(panels), 1), 4), squeeze=False)
    for (model, context), axis in zip(panels, axes[0], strict=False):
        within = [row for row in decoding if (row["model"], row["context"]) == (model, context)]
        for peer in dict.fromkeys(row["peer"] for row in within):
            points = sorted((row["batch"], row["tokens_per_second"]) for row in within if row["peer"] == peer)
            style = {"bridle": "-", "llama.cpp": "--"}.get(peer.split(" ")[0], ":")
            axis.plot(*zip(*points, strict=True), style, marker="o", label=peer)
        axis.set(xscale="log", yscale="log", xlabel="sequences", ylabel="tokens/s", title=f"{model}, context {context}")
        axis.legend(fontsize=7)
    drawing.tight_layout()
    drawing.savefig(path, metadata={"Date": None})
    plots.close(drawing)
