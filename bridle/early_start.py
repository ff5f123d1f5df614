"""Prepares a model's files while the serving modules are imported, because an import uses only one core. A thread reads
torch's shared library into memory, and another process unpacks a new GGUF file."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path

from bridle.cgroups import num_cores
from bridle.threads import start_thread

_LIBRARY = "libtorch_cpu.so"
UNPACKING: list[subprocess.Popen[bytes]] = []


def preload_torch() -> Future[None]:
    """Read torch's shared library in a thread, without importing torch. The returned future completes when the library
    is read, or at once if torch is not installed."""
    return start_thread(_load_library, "bridle-preload")


def _load_library() -> None:
    spec = find_spec("torch")
    path = None if spec is None or spec.origin is None else Path(spec.origin).parent / "lib" / _LIBRARY
    if path is not None and path.is_file():
        ctypes.CDLL(str(path))  # other threads run meanwhile


def begin_unpacking(path: Path) -> bool:
    """Unpack a GGUF file in a separate process. Returns whether a process was started for the file. No process is
    started if the file is already unpacked, or if there is no free core."""
    from bridle.gguf.folder import is_unpacked

    if num_cores() < 2 or not path.is_file() or is_unpacked(path):
        return False
    command = [sys.executable, "-m", "bridle.tokenizer.unpacking", str(path)]
    nothing = subprocess.DEVNULL  # the loader of the file reports errors again
    UNPACKING.append(subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing))  # noqa: S603
    return True


def await_unpacking() -> None:
    """Wait until the GGUF files are unpacked. Meanwhile this thread imports torch, which the next step needs."""
    while UNPACKING:
        process = UNPACKING.pop()
        if process.poll() is None:
            import torch  # noqa: F401
        process.wait()
