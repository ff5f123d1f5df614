"""Recipe of `uppercase`: one file of C."""

from __future__ import annotations

from pathlib import Path

from dev.controllers.toolchain import SMALL, ZIG, zig_cc

SOURCES: dict[str, str] = {}
TOOLS = {"ziglang": ZIG}


def build(out: Path) -> None:
    """Compile it."""
    zig_cc([*SMALL, "-o", out, Path(__file__).parent / "uppercase.c"])
