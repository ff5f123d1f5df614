"""`--watch`: repeats an action whenever a file is saved. A file counts as saved when its time or size changes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import sleep

from bridle.errors import BridleError

_INTERVAL = 0.2  # seconds between two checks

#: Times and sizes of some files, by which two states of the files differ.
Stamp = tuple[tuple[int, int], ...]


def stamp(paths: Sequence[Path]) -> Stamp:
    """Return the times and sizes of the files. A missing file has a special value, because an editor may remove a file
    briefly while it saves."""
    return tuple(_one(path) for path in paths)


def _one(path: Path) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (0, -1)
    return found.st_mtime_ns, found.st_size


def watch(paths: Sequence[Path], run: Callable[[Callable[[], bool]], object], look: float = _INTERVAL) -> None:
    """Call `run`, and call it again each time one of the files was saved. Never returns. `run` receives a function that
    returns whether a file was saved since `run` began, so that it can stop early. Errors of `run` are printed.
    """
    shown = ", ".join(str(path) for path in paths)
    while True:
        seen = stamp(paths)
        try:
            run(lambda seen=seen: stamp(paths) != seen)  # type: ignore[misc]
        except BridleError as error:
            print(f"bridle: {error}", file=sys.stderr)
        print(f"-- waiting for {shown} to be saved; Ctrl-C ends", file=sys.stderr, flush=True)
        while stamp(paths) == seen or (0, -1) in stamp(paths):
            sleep(look)
