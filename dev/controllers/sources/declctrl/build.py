"""Recipe of `declctrl`: the interpreter of `jsctrl` with another program built in."""

from __future__ import annotations

from pathlib import Path

from dev.controllers.sources.jsctrl.build import COMMON, QUICKJS, TOOLS, make
from dev.controllers.sources.jsctrl.build import SOURCES as SCRIPT_SOURCES

HERE = Path(__file__).parent
SOURCES = {QUICKJS: SCRIPT_SOURCES[QUICKJS]}
_OWN = {
    "aici/main": "main.js",
    **{f"decl/{path}": f"{path}.js" for path in ("machine", "parts", "program", "values")},
}

__all__ = ["SOURCES", "TOOLS", "build"]


def build(out: Path) -> None:
    """Compile, start and save."""
    make(out, COMMON | {name: HERE / "lib" / file for name, file in _OWN.items()})
