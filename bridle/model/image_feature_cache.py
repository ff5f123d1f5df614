"""Image rows in prompts that attend to all of themselves, so that the next prompt with one of the images need not
encode it again.

They are kept by key, within a number of bytes; the least recently used leave first. Keys cannot be forged and differ
between tenants, so a hit does not reveal what others have sent.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from torch import Tensor


class PictureRows:
    """Rows [N, hidden] by key, `max_bytes` together at most. Any thread may call."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()

    def find(self, key: bytes) -> Tensor | None:
        """Those of an image, if they are kept; they are then the last to leave."""
        with self._lock:
            if key in self._rows:
                self._rows.move_to_end(key)
            return self._rows.get(key)

    def keep(self, key: bytes, rows: Tensor) -> None:
        """Keep the rows of an image, unless it has more bytes than all may have."""
        if rows.nbytes > self.max_bytes:
            return
        with self._lock:
            self._rows[key] = rows
            used = sum(each.nbytes for each in self._rows.values())
            while used > self.max_bytes:
                used -= self._rows.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Release all of them."""
        with self._lock:
            self._rows.clear()
