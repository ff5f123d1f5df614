"""A fake transport that records the data that is written to it."""

from __future__ import annotations

import asyncio
from typing import Any


class Carrier(asyncio.Transport):
    """A transport that records the written data, and whether reading is paused."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 1), "peername": ("127.0.0.2", 2)})
        self.written = b""
        self.is_read = True
        self.is_aborted = False

    def write(self, data: Any) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None: ...

    def close(self) -> None: ...
