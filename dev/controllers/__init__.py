"""What the standard controllers are built from: sources, recipes, and `make controllers`, which builds them anew.

The modules themselves ship in `bridle.controllers.standard`.
"""

from __future__ import annotations

from pathlib import Path

#: A folder for each controller, with its recipe `build.py`.
SOURCES = Path(__file__).parent / "sources"
