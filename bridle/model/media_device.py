"""Encodes pictures in this process and holds their features for the steps. Which of them stay is decided elsewhere."""

from __future__ import annotations

import threading

from bridle.engine.media import Medium
from bridle.errors import InternalError
from bridle.model.media_encoder import Features, MediaEncoder
from bridle.threads import run_behind


class LocalMedia:
    """Implements `bridle.engine.interfaces.MediaDevice` over an encoder, and gives the runner what it holds."""

    def __init__(self, encoder: MediaEncoder, max_bytes: int) -> None:
        self.epoch = 0
        self.max_bytes = max_bytes
        self._encoder = encoder
        self._lock = threading.Lock()
        self._num_clears = 0
        self._features: dict[bytes, Features] = {}

    @property
    def row_bytes(self) -> int:
        """The memory of one row of features."""
        return self._encoder.row_bytes

    def num_bytes(self, medium: Medium) -> int:
        return medium.num_rows * self.row_bytes

    def encode(self, medium: Medium) -> None:
        """Behind the steps on a CPU, whose processors both need, and by a thread that ends: see `bridle.threads`."""
        num_clears = self._num_clears
        if self._encoder.is_on_cpu:
            features = run_behind(lambda: self._encoder.encode(medium), "bridle-encode")
        else:
            features = self._encoder.encode(medium)
        with self._lock:
            if num_clears == self._num_clears:
                self._features[medium.key] = features

    def drop(self, key: bytes) -> None:
        self._features.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._num_clears += 1
            self._features.clear()

    def features(self, key: bytes) -> Features:
        """Those of a picture that the step's plan names. Raises `InternalError` if they are not there."""
        found = self._features.get(key)
        if found is None:
            raise InternalError(f"the plan names picture {key.hex()}, whose features are not on the device")
        return found
