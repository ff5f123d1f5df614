"""Returns free memory of the C library's heap, which libraries in other languages share, to the system.

Freed memory stays with the process, in pieces between what is in use, until it is returned explicitly. A server whose
clients make it build and drop hundreds of megabytes would keep all of them. Without glibc these functions do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes


def return_free_memory() -> None:
    """Return free memory to the system. This takes some milliseconds for each hundred megabytes; other
    threads run on."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
