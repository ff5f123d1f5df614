"""What recipes (`sources/NAME/build.py`) share: the C compiler from a Python package, and pinned downloads from the
package registry.

A build must give the same bytes everywhere, so nothing of the machine gets in: no paths, no dates, no debug names.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bridle.errors import InvalidRequest

#: The folder with `bridle_controller.h`.
INCLUDE = Path(__file__).parent / "include"
#: The version of `ziglang` that builds what is shipped.
ZIG = "0.17.1"
#: A core module without a C library and without traces of where it was built.
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
_MAX_SHOWN = 4_000


def zig_cc(arguments: Sequence[str | Path], *, cwd: Path | None = None) -> None:
    """Run `zig cc`, which comes as the Python package `ziglang`. Raises `InvalidRequest` with what it said."""
    with tempfile.TemporaryDirectory(prefix="bridle-zig-") as cache:
        environment = {**os.environ, "ZIG_LOCAL_CACHE_DIR": cache}
        run([sys.executable, "-m", "ziglang", "cc", *map(str, arguments)], cwd=cwd, environment=environment)


def run(command: Sequence[str], *, cwd: Path | None = None, environment: dict[str, str] | None = None) -> None:
    """Run a tool. Raises `InvalidRequest` with the end of what it said."""
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        said = (done.stdout + done.stderr)[-_MAX_SHOWN:]
        raise InvalidRequest(f"{' '.join(command[:4])} ... ended with {done.returncode}:\n{said}")


def download(requirement: str, sha256: str, folder: Path) -> Path:
    """The source archive of `NAME==VERSION` from the package registry, checked against its hash."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run([*pip, "--no-binary", ":all:", "--dest", str(folder), requirement])
    (path,) = folder.iterdir()
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise InvalidRequest(f"{path.name} has the SHA-256 {found}; {sha256} was pinned")
    return path
