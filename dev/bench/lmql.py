"""The original LMQL, unmodified from the package index, in a separate virtual environment.

LMQL was last released in 2023 and does not pin its requirements. `PACKAGES` is a set of package versions that works on
Python 3.11. LMQL is never imported here; it is run as a program.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

from bridle.errors import InvalidRequest, UnsupportedFeature

VERSION = "0.7.3"
#: Packages for queries: the client needs no torch.
CLIENT_PACKAGES = (f"lmql=={VERSION}", "transformers==4.57.6", "aiohttp==3.14.5", "numpy==2.4.6")
#: Packages for `lmql serve-model` as well.
PACKAGES = (*CLIENT_PACKAGES, "torch==2.13.0")


def lmql_python(folder: Path | None = None, *, packages: tuple[str, ...] = PACKAGES) -> Path:
    """Return the Python interpreter of an environment with LMQL, in `folder` or in a cache folder. A missing
    environment is created."""
    folder = folder or default_folder()
    python = folder / "bin" / "python"
    if not has_lmql(python):
        install(folder, packages)
    return python


def default_folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "bridle" / f"lmql-{VERSION}-py{sys.version_info.major}.{sys.version_info.minor}"


def install(folder: Path, packages: tuple[str, ...] = PACKAGES) -> None:
    """Create the environment, or complete an existing one, which takes minutes. Raises `InvalidRequest` for a folder
    with other contents. Raises `UnsupportedFeature` with the installer's last output if the installation fails."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
        raise InvalidRequest(f"{folder} holds something that is no virtual environment; name another folder", "lmql")
    venv.create(folder, with_pip=False, symlinks=True)
    # The pip of this process installs into the other environment, because some systems have no bundled pip.
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-q", *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        last = " ".join(done.stderr.split())[-500:]
        raise UnsupportedFeature(f"LMQL {VERSION} cannot be installed into {folder}: {last}", "lmql")


def has_lmql(python: Path) -> bool:
    """Return whether the interpreter `python` has the right version of LMQL."""
    if not python.is_file():
        return False
    code = f"import importlib.metadata as m, sys; sys.exit(m.version('lmql') != '{VERSION}')"
    return subprocess.run([str(python), "-c", code], capture_output=True, check=False).returncode == 0  # noqa: S603
