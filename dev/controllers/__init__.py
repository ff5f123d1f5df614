"""Build of the standard controllers: sources, recipes, and `make controllers`, which rebuilds them.

The modules themselves ship in `bridle.controllers.standard`.
"""

from __future__ import annotations

from pathlib import Path

#: A folder for each controller, with its recipe `build.py`.
SOURCES = Path(__file__).parent / "sources"
