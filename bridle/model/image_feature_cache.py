"""Cache of encoded images, so that the next prompt with the same image need not encode it again. The cache is used for
models in which the rows of an image attend to each other in both directions. An entry of the cache holds the feature
rows of one image. The cache has a maximum size in bytes. The least recently used rows are evicted first. Keys cannot be
forged and differ between tenants, so a hit does not reveal the images of other tenants.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from torch import Tensor


class PictureRows:
    """Feature rows [N, hidden] of images by key, limited to `max_bytes` bytes in total. Any thread may call the
    methods."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()

    def find(self, key: bytes) -> Tensor | None:
        """Return the feature rows of an image, or None. The returned rows become the most recently used rows of the
        cache."""
        with self._lock:
            if key in self._rows:
                self._rows.move_to_end(key)
            return self._rows.get(key)

    def keep(self, key: bytes, rows: Tensor) -> None:
        """Store the feature rows of an image, unless these rows alone exceed `max_bytes`."""
        if rows.nbytes > self.max_bytes:
            return
        with self._lock:
            self._rows[key] = rows
            used = sum(each.nbytes for each in self._rows.values())
            while used > self.max_bytes:
                used -= self._rows.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Release the feature rows of all images."""
        with self._lock:
            self._rows.clear()
