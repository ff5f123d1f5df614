"""Cache of image rows, so that the next prompt with the same image need not encode it again. The cache is for models in
which the rows of an image attend to each other in both directions.

Rows are kept by key, within a number of bytes. The least recently used rows are evicted first. Keys cannot be forged
and differ between tenants, so a hit does not reveal the images of other tenants.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from torch import Tensor


class PictureRows:
    """Rows [N, hidden] by key, of at most `max_bytes` bytes together. Any thread may call."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()

    def find(self, key: bytes) -> Tensor | None:
        """Return the rows of an image, or None. Rows that are found are evicted last."""
        with self._lock:
            if key in self._rows:
                self._rows.move_to_end(key)
            return self._rows.get(key)

    def keep(self, key: bytes, rows: Tensor) -> None:
        """Keep the rows of an image, unless they exceed `max_bytes` alone."""
        if rows.nbytes > self.max_bytes:
            return
        with self._lock:
            self._rows[key] = rows
            used = sum(each.nbytes for each in self._rows.values())
            while used > self.max_bytes:
                used -= self._rows.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Release the rows of all images."""
        with self._lock:
            self._rows.clear()
