"""Plots of simulation results, as SVG. The same figures give the same files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dev.bench.plots import pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Run = dict[str, Any]

_COLORS = {"prefix": "#1b6ca8", "least loaded": "#c26a1a", "random": "#7a7a7a"}
_QUANTILES = ("p50", "p90", "p99", "p99.9")


def draw_all(figures: dict[str, Any], folder: Path) -> None:
    """Draw a plot for each part that has figures. Raises `UnsupportedFeature` without matplotlib."""
    pyplot()
    for name, draw in _PLOTS.items():
        if name in figures:
            draw(figures[name], folder / f"{name}.svg")


def _save(path: Path, draw: Callable[[Sequence[Axes]], None], num_panels: int) -> None:
    plots = pyplot()
    figure, axes = plots.subplots(1, num_panels, figsize=(3.4 * num_panels, 2.9), squeeze=False)
    draw(axes[0])
    for panel in axes[0]:
        panel.grid(visible=True, alpha=0.3, linewidth=0.5)
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plots.close(figure)


def _by_policy(runs: Sequence[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run["policy"], []).append(run)
    return groups


def _draw_checked(runs: Sequence[Run], path: Path) -> None:
    """Plot quantiles of the real engine (lines) and of its model (crosses)."""

    def draw(axes: Sequence[Axes]) -> None:
        for axis, measure, title in zip(axes, ("ttft", "latency"), ("first token", "last token"), strict=True):
            for policy, group in _by_policy(runs).items():
                for run in group:
                    values = [run[measure][name] for name in _QUANTILES]
                    is_engine = run["core"] == "engine"
                    label = policy if is_engine else None
                    style = "-" if is_engine else "x"
                    axis.plot(_QUANTILES, values, style, color=_COLORS[policy], label=label, linewidth=1.2)
            axis.set_yscale("log")
            axis.set_title(f"seconds to the {title}")
        axes[0].legend(frameon=False, title="engine: line, model: x")

    _save(path, draw, 2)


def _draw_against(key: str, label: str) -> Callable[[Sequence[Run], Path], None]:
    def draw_runs(runs: Sequence[Run], path: Path) -> None:
        def draw(axes: Sequence[Axes]) -> None:
            for policy, group in _by_policy(runs).items():
                x, color = [run[key] for run in group], _COLORS[policy]
                axes[0].plot(x, [run["ttft"]["p50"] for run in group], "--", color=color, linewidth=1)
                axes[0].plot(x, [run["ttft"]["p99"] for run in group], "o-", color=color, markersize=3)
                axes[1].plot(x, [100 * run["hit_rate"] for run in group], "o-", color=color, markersize=3, label=policy)
                axes[2].plot(x, [100 * run["busy_spread"] for run in group], "o-", color=color, markersize=3)
            axes[0].set_yscale("log")
            axes[1].legend(frameon=False, loc="upper right")
            titles = ("TTFT, s: p99, p50 dashed", "prompt tokens found, %", "spread of work over replicas, %")
            for axis, title in zip(axes, titles, strict=True):
                axis.set_title(title)
                axis.set_xlabel(label)
            axes[1].set_ylim(0, 100)
            axes[2].set_ylim(bottom=0)

        _save(path, draw, 3)

    return draw_runs


def _draw_large(runs: Sequence[Run], path: Path) -> None:
    def draw(axes: Sequence[Axes]) -> None:
        for run in runs:
            color = _COLORS[run["policy"]]
            for axis, measure in zip(axes, ("ttft", "latency"), strict=True):
                values = [run[measure][name] for name in _QUANTILES]
                axis.plot(_QUANTILES, values, "o-", color=color, markersize=3, label=run["policy"])
                axis.set_yscale("log")
        axes[0].set_title("seconds to the first token")
        axes[1].set_title("seconds to the last token")
        axes[0].legend(frameon=False)

    _save(path, draw, 2)


_PLOTS: dict[str, Callable[[Sequence[Run], Path], None]] = {
    "checked": _draw_checked,
    "load": _draw_against("offered", "requests/s and replica"),
    "losses": _draw_against("losses_per_hour", "losses per hour and replica"),
    "large": _draw_large,
}
