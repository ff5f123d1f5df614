"""Prepares a model's files while the serving libraries are imported, because imports keep only one core busy. A thread
reads torch's own library, and another process unpacks a GGUF file that is new."""

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
    """Read torch's library without importing torch, in a thread. Completes when that is done, or there is none."""
    return start_thread(_load_library, "bridle-preload")


def _load_library() -> None:
    spec = find_spec("torch")
    path = None if spec is None or spec.origin is None else Path(spec.origin).parent / "lib" / _LIBRARY
    if path is not None and path.is_file():
        ctypes.CDLL(str(path))  # which other threads do not wait for


def begin_unpacking(path: Path) -> bool:
    """Unpack a GGUF file in a process of its own. Returns whether one was started: there is none for a file that is
    unpacked, or where there is no core to spare."""
    from bridle.gguf.folder import is_unpacked

    if num_cores() < 2 or not path.is_file() or is_unpacked(path):
        return False
    command = [sys.executable, "-m", "bridle.tokenizer.unpacking", str(path)]
    nothing = subprocess.DEVNULL  # errors are found again by who loads the file
    UNPACKING.append(subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing))  # noqa: S603
    return True


def await_unpacking() -> None:
    """Wait until the files that were begun are unpacked. Meanwhile torch is imported, which is needed next."""
    while UNPACKING:
        process = UNPACKING.pop()
        if process.poll() is None:
            import torch  # noqa: F401
        process.wait()
