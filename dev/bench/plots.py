"""The plotting library, configured so that the same figures give the same files."""

from __future__ import annotations

from typing import Any

from bridle.distribution import install_hint
from bridle.errors import UnsupportedFeature


def pyplot() -> Any:
    """Return matplotlib's `pyplot`, configured to draw into files. Raises `UnsupportedFeature` without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedFeature(f"plots need matplotlib: {install_hint('bench')}", "report") from error
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "bridle", "font.size": 9})
    from matplotlib import pyplot

    return pyplot
