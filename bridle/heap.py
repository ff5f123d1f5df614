"""The C library's heap, which libraries in other languages share: what is taken of it, and giving back what is free.

What was freed stays with the process, in pieces between what is in use; nothing returns it but asking. A server whose
clients make it build and drop hundreds of megabytes would keep all of them. Elsewhere than with glibc nothing is known
and nothing can be done.
"""

from __future__ import annotations

import contextlib
import ctypes


def return_free_memory() -> None:
    """Give the system what is free. Takes some milliseconds for each hundred megabytes; other threads run on."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
