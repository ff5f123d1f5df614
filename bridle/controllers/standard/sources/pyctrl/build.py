"""Build pyctrl: CPython with `guest/`, as a component, made offline by componentize-py."""

from __future__ import annotations

import shutil
import sysconfig
import tempfile
from pathlib import Path

from bridle.controllers.standard.toolchain import run

GUEST = Path(__file__).parent / "guest"
WIT = Path(__file__).parents[4] / "aici" / "runtime" / "wit"

SOURCES: dict[str, str] = {}
TOOLS = {"componentize-py": "0.25.1"}


def build(out: Path) -> None:
    """Write the module to `out`."""
    tool = Path(sysconfig.get_path("scripts")) / "componentize-py"
    with tempfile.TemporaryDirectory(prefix="bridle-pyctrl-") as folder:
        guest = shutil.copytree(GUEST, Path(folder) / "guest", ignore=shutil.ignore_patterns("__pycache__"))
        command = [str(tool), "--quiet", "--wit-path", str(WIT), "--world", "controller", "componentize", "app"]
        run([*command, "--python-path", str(guest), "--output", str(out)])
