"""The genuine LMQL, from the package index, unmodified, in a virtual environment of its own.

It is from 2023 and does not state its requirements in versions of today: `PACKAGES` is a set that installs and works
together on Python 3.11. Nothing of it is ever imported here; it is run as a program.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

from bridle.errors import InvalidRequest, UnsupportedFeature

VERSION = "0.7.3"
#: For queries: the client side alone needs no torch.
CLIENT_PACKAGES = (f"lmql=={VERSION}", "transformers==4.57.6", "aiohttp==3.14.5", "numpy==2.4.6")
#: For `lmql serve-model` too.
PACKAGES = (*CLIENT_PACKAGES, "torch==2.13.0")


def lmql_python(folder: Path | None = None, *, packages: tuple[str, ...] = PACKAGES) -> Path:
    """The interpreter of an environment with LMQL: the one in `folder`, or in a cache folder; made where missing."""
    folder = folder or default_folder()
    python = folder / "bin" / "python"
    if not has_lmql(python):
        install(folder, packages)
    return python


def default_folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "bridle" / f"lmql-{VERSION}-py{sys.version_info.major}.{sys.version_info.minor}"


def install(folder: Path, packages: tuple[str, ...] = PACKAGES) -> None:
    """Make the environment, or complete an existing one; takes minutes. `InvalidRequest` for a folder of something
    else, `UnsupportedFeature` with the installer's last words if it fails."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
        raise InvalidRequest(f"{folder} holds something that is no virtual environment; name another folder", "lmql")
    venv.create(folder, with_pip=False, symlinks=True)
    # This process's own pip installs into the other environment: some systems ship no bundled one.
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-q", *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        last = " ".join(done.stderr.split())[-500:]
        raise UnsupportedFeature(f"LMQL {VERSION} cannot be installed into {folder}: {last}", "lmql")


def has_lmql(python: Path) -> bool:
    """Return whether the interpreter `python` can run LMQL."""
    if not python.is_file():
        return False
    code = f"import importlib.metadata as m, sys; sys.exit(m.version('lmql') != '{VERSION}')"
    return subprocess.run([str(python), "-c", code], capture_output=True, check=False).returncode == 0  # noqa: S603
