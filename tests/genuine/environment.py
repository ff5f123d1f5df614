"""Virtual environments for programs that do not go with ours, made once and kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from tests.waiting import PATIENCE

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def foreign_python(*packages: str) -> Path:
    """The interpreter of an environment with exactly `packages`, pinned as `name==version`, and what they need."""
    return _made(_folder(packages), packages)


def layered_python(*packages: str) -> Path:
    """The interpreter of an environment with `packages` over all that is installed in this one, bridle included."""
    here = sysconfig.get_path("purelib")
    folder = _folder((*packages, f"over {here}"))
    return _made(folder, (*packages, "-c", str(CONSTRAINTS)), f"import site; site.addsitedir({here!r})")


def _made(folder: Path, arguments: Sequence[str], path_line: str | None = None) -> Path:
    """The interpreter of a folder's environment, made if it is not there; `path_line` is run at each start."""
    python, done = folder / "bin" / "python", folder / "complete"
    if not done.exists():
        venv.create(folder, with_pip=False, clear=True, symlinks=True)
        if path_line is not None:
            (site,) = folder.glob("lib/python*/site-packages")
            (site / "layer.pth").write_text(path_line + "\n")
        # Our own pip installs into the other environment: some systems ship no bundled one.
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", *arguments]
        subprocess.run(command, check=True)
        done.touch()
    return python


def run_script(python: Path, script: Path, *arguments: str) -> str:
    """What a script prints; fails with its errors."""
    done = subprocess.run(
        [str(python), str(script), *arguments], capture_output=True, text=True, timeout=PATIENCE, env=_environment()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _folder(packages: tuple[str, ...]) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256(repr((sys.version_info[:2], sorted(packages))).encode()).hexdigest()[:12]
    return cache / "bridle" / "genuine" / f"{packages[0].partition('==')[0]}-{key}"


def _environment() -> dict[str, str]:
    """Nothing of ours on the path of theirs, nor in their settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
