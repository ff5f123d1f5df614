"""Creates and removes folders for unix sockets that connect parent and child processes. Only the current user can enter
these folders.

A process that is killed cannot clean up, so the next process removes the folders of ended processes.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

import psutil

#: The name of the file by which the ranks of a group find each other.
STORE = "group"
_NAME = re.compile(r"bridle-(\d+)-\w+")


def make_socket_folder() -> Path:
    """Create a folder that only the current user can enter, and return its path."""
    sweep()
    return Path(tempfile.mkdtemp(prefix=f"bridle-{os.getpid()}-"))


def sweep() -> None:
    """Remove the folders of ended processes."""
    for path in Path(tempfile.gettempdir()).glob("bridle-*"):
        match = _NAME.fullmatch(path.name)
        if match and not psutil.pid_exists(int(match[1])) and _is_ours(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    """Return whether `make_socket_folder` created a folder: it contains only sockets and the file with which ranks find
    each other."""
    try:
        is_own = path.lstat().st_uid == os.getuid() and path.is_dir() and not path.is_symlink()
        return is_own and all(child.is_socket() or child.name == STORE for child in path.iterdir())
    except OSError:
        return False
