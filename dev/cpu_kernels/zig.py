"""The C compiler from a Python package, which is needed only to build the shipped files.

A build must give the same bytes everywhere, so the output must not depend on the machine: no paths, no dates, no debug
names.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bridle.errors import InvalidRequest

#: The version of `ziglang` that builds the shipped objects.
ZIG = "0.17.1"
_MAX_SHOWN = 4_000


def zig_cc(arguments: Sequence[str | Path], *, cwd: Path | None = None) -> None:
    """Run `zig cc` from the Python package `ziglang`. Raises `InvalidRequest` with the compiler's output if the command
    fails."""
    with tempfile.TemporaryDirectory(prefix="bridle-zig-") as cache:
        environment = {**os.environ, "ZIG_LOCAL_CACHE_DIR": cache}
        run([sys.executable, "-m", "ziglang", "cc", *map(str, arguments)], cwd=cwd, environment=environment)


def run(command: Sequence[str], *, cwd: Path | None = None, environment: dict[str, str] | None = None) -> None:
    """Run a tool. Raises `InvalidRequest` with the end of the output if the command fails."""
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        said = (done.stdout + done.stderr)[-_MAX_SHOWN:]
        raise InvalidRequest(f"{' '.join(command[:4])} ... ended with {done.returncode}:\n{said}")
