"""Tools of `examples/tools.toml` for tests. The example's own server runs unchanged. The reference server for times
also runs unchanged, or is replaced by a fake whose time never changes."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from bridle.controller_tools import ToolExecutor
from bridle.controller_tools.config import make_desk
from tests.sources import ROOT

STAND_IN = ROOT / "tests" / "controller_tools" / "mcp_server.py"


def example_tools(starts: Path | None) -> ToolExecutor:
    """Return the example's tools. A fake time server notes its starts in the folder `starts`; with None the real one
    runs."""
    content = tomllib.loads((ROOT / "examples" / "tools.toml").read_text(encoding="utf-8"))
    for table in content["tools"].values():
        program, *arguments = table["mcp"]
        assert program == "python"  # this one, and files of this checkout
        table["mcp"] = [sys.executable, *(str(ROOT / each) if each.endswith(".py") else each for each in arguments)]
    if starts is not None:
        content["tools"]["time"]["mcp"] = [sys.executable, "-I", "-S", str(STAND_IN), str(starts)]
    content["limits"] = {"timeout": 300}  # a busy machine starts a server slowly
    return make_desk(content)
