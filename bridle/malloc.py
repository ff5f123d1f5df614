"""Memory that the C library's heap, which libraries in other languages share, keeps after it is freed.

Freed memory stays with the process, in pieces between used ones, until it is returned explicitly. A server whose
clients make it build and drop hundreds of megabytes would keep all of them. Large buffers are the opposite: each is
returned when it is freed, and the next one is handed out page by page again. Without glibc these functions do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: Buffers up to this size come from the heap, and so much of it may lie free at its end.
LARGEST_KEPT, MOST_KEPT = 1 << 29, 1 << 28


def keep_large_buffers() -> None:
    """From now on, take large buffers from memory that was freed before: buffers that each step of a model makes again.
    Drawing for 64 rows of 152,000 tokens takes a third of the processor time then. `return_free_memory` returns these,
    too."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
        library.mallopt(_TRIM_THRESHOLD, MOST_KEPT)


def return_free_memory() -> None:
    """Return free memory to the system. This takes some milliseconds for each hundred megabytes; other
    threads run on."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
