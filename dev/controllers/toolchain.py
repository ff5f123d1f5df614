"""Common code of the builds (`sources/NAME/build.py`): the C compiler from a Python package, and pinned downloads from
the package registry.

A build must give the same bytes everywhere, so the output must not depend on the machine: no paths, no dates, no debug
names.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from bridle.controllers.standard import FOLDER
from bridle.errors import InvalidRequest
from dev.cpu_kernels.zig import ZIG, run, zig_cc

__all__ = ["INCLUDE", "SMALL", "ZIG", "download", "run", "zig_cc"]

#: The folder with `bridle_controller.h`.
INCLUDE = FOLDER / "include"
#: Compiler flags for a core module without a C library, and without traces of the build folder.
SMALL = (
    "--target=wasm32-freestanding",
    "-ffreestanding",
    "-nostdlib",
    "-Wl,--no-entry",
    "-Wl,--strip-all",
    "-Wl,-z,stack-size=65536",
    "-mcpu=generic+bulk_memory",
    "-Oz",
    "-g0",
    "-fno-sanitize=undefined",
    f"-I{INCLUDE}",
)


def download(requirement: str, sha256: str, folder: Path) -> Path:
    """Return the source archive of `NAME==VERSION` from the package registry, checked against its hash."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run([*pip, "--no-binary", ":all:", "--dest", str(folder), requirement])
    (path,) = folder.iterdir()
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise InvalidRequest(f"{path.name} has the SHA-256 {found}; {sha256} was pinned")
    return path
