"""`--watch`: do something again whenever a file is saved. Looks at the files' times; knows nothing of what is done."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import sleep

from bridle.errors import BridleError

_INTERVAL = 0.2  # seconds between looks

#: Times and sizes: what tells one state of some files from another.
Stamp = tuple[tuple[int, int], ...]


def stamp(paths: Sequence[Path]) -> Stamp:
    """The state of the files. One that is not there, as for a moment while an editor saves, has a state too."""
    return tuple(_one(path) for path in paths)


def _one(path: Path) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (0, -1)
    return found.st_mtime_ns, found.st_size


def watch(paths: Sequence[Path], run: Callable[[Callable[[], bool]], object], look: float = _INTERVAL) -> None:
    """Run, and again whenever one of the files was saved; for ever. `run` is given a function that tells whether a
    file was saved meanwhile, and may break off. Its errors are shown, and the next save tries again."""
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
