"""Runs `bridle serve` with a wall clock and a name service that another process controls.

    python -m dev.bench.soaked_server FILE ARGUMENTS...

The file FILE holds two numbers, which are read at each use. The first is the error of the wall clock in seconds. The
second is the number of seconds that a name look-up takes before it fails.
"""

from __future__ import annotations

import mmap
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

_FORM = struct.Struct("dd")


class Faults:
    """The two numbers in FILE, which are zero at first. Both processes may write the numbers."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_FORM.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FORM.size)

    @property
    def clock_seconds(self) -> float:
        return float(_FORM.unpack_from(self._memory)[0])

    @property
    def name_seconds(self) -> float:
        return float(_FORM.unpack_from(self._memory)[1])

    def set(self, clock_seconds: float = 0.0, name_seconds: float = 0.0) -> None:
        _FORM.pack_into(self._memory, 0, clock_seconds, name_seconds)


def install(faults: Faults) -> None:
    """Make this process use the clock error and the slow name look-ups of `faults`."""
    now, look_up = time.time, socket.getaddrinfo

    def getaddrinfo(host: Any, *arguments: Any, **options: Any) -> Any:
        if not faults.name_seconds:
            return look_up(host, *arguments, **options)
        time.sleep(faults.name_seconds)
        raise socket.gaierror(socket.EAI_AGAIN, "the name service does not answer")

    time.time = lambda: now() + faults.clock_seconds
    socket.getaddrinfo = getaddrinfo


def main() -> int:
    """Run the server."""
    install(Faults(Path(sys.argv.pop(1))))
    from bridle.cli import main as bridle

    return bridle(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
