"""Folders for the unix sockets (and other files) at which parent and child processes meet. Only this user can enter
them.

A process that is killed cannot clean up, so the next one removes the folders of processes that have ended.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

import psutil

#: The file at which the ranks of a group meet.
STORE = "group"
_NAME = re.compile(r"bridle-(\d+)-\w+")


def make_socket_folder() -> Path:
    """A fresh folder that only this user can enter."""
    sweep()
    return Path(tempfile.mkdtemp(prefix=f"bridle-{os.getpid()}-"))


def sweep() -> None:
    """Remove the folders of processes that have ended."""
    for path in Path(tempfile.gettempdir()).glob("bridle-*"):
        match = _NAME.fullmatch(path.name)
        if match and not psutil.pid_exists(int(match[1])) and _is_ours(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    """Return whether this is such a folder: it holds only sockets and the rendezvous file of ranks."""
    try:
        is_own = path.lstat().st_uid == os.getuid() and path.is_dir() and not path.is_symlink()
        return is_own and all(child.is_socket() or child.name == STORE for child in path.iterdir())
    except OSError:
        return False
