"""`--watch`: repeats an action whenever a file is saved. It looks at the files' times, and knows nothing of
the action."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import sleep

from bridle.errors import BridleError

_INTERVAL = 0.2  # seconds between looks

#: Times and sizes of some files, which tell one state of them from another.
Stamp = tuple[tuple[int, int], ...]


def stamp(paths: Sequence[Path]) -> Stamp:
    """The state of the files. A missing file, as for a moment while an editor saves, has a state, too."""
    return tuple(_one(path) for path in paths)


def _one(path: Path) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (0, -1)
    return found.st_mtime_ns, found.st_size


def watch(paths: Sequence[Path], run: Callable[[Callable[[], bool]], object], look: float = _INTERVAL) -> None:
    """Call `run`, and call it again whenever one of the files was saved, for ever. `run` gets a function that returns
    whether a file was saved meanwhile, so that it can stop early. Its errors are shown, and the next save tries again.
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
