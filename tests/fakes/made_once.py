"""Folders that are written once and copied afterwards. The processes of one test run share them."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from functools import cache, wraps
from hashlib import blake2b
from pathlib import Path
from typing import Any

#: The variable with the folder that the processes of a run share. Without it, each process has a folder of its own.
SHARED = "MADE_ONCE"
_writing = threading.RLock()


def made_once(make: Callable[..., Any]) -> Callable[..., Path]:
    """Decorate a function that writes files into a given folder. For equal other arguments, the files of the first call
    are copied, so the files may depend only on these arguments. The decorated function returns the folder."""

    @wraps(make)
    def copied(*arguments: Any, **options: Any) -> Path:
        (folder,) = [each for each in arguments if isinstance(each, Path)]
        others = [each for each in arguments if each is not folder]

        def write(path: Path) -> None:
            make(*(path if each is folder else each for each in arguments), **options)

        shutil.copytree(shared_folder(make.__qualname__, [others, sorted(options.items())], write), folder,
                        dirs_exist_ok=True)  # fmt: skip
        return folder

    return copied


def shared_folder(name: str, key: object, write: Callable[[Path], object]) -> Path:
    """Return the folder that `write` filled for this name and key, in any process of the test run. The folder must not
    be changed."""
    made = _root() / f"{name.strip('_')}-{blake2b(repr(key).encode(), digest_size=8).hexdigest()}"
    with _writing:  # threads of one process write one after the other, because transformers cannot save in two threads
        if not made.exists():
            _write(made, write)
    return made


def _write(made: Path, write: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory(dir=_root()) as part:
        path = Path(part) / "made"
        path.mkdir()
        write(path)
        with contextlib.suppress(OSError):  # another process was faster
            path.rename(made)


@cache
def _root() -> Path:
    shared = os.environ.get(SHARED)
    if shared is None:
        _temporary.append(tempfile.TemporaryDirectory(prefix="bridle-made-"))
        return Path(_temporary[0].name)
    Path(shared).mkdir(exist_ok=True)
    return Path(shared)


_temporary: list[tempfile.TemporaryDirectory[str]] = []
