"""Encodes images and sounds in this process, and stores their features for the steps. The engine decides which features
are kept."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from bridle.engine.multimodal.multimodal_inputs import MultiModalItem
from bridle.errors import InternalError
from bridle.model.image_feature_cache import PictureRows
from bridle.model.media_encoder import Features, MediaEncoder, alike
from bridle.threads import run_after

#: Maximum images that are encoded together. Their inputs of the tower have at most the bytes of one large image, so
#: that together they need no more memory than one image.
MAX_TOGETHER = 16
MAX_TOGETHER_BYTES = 12 << 20


class LocalMedia:
    """Implements `bridle.engine.interfaces.BatchedMedia` over an encoder, and gives the runner the encoded features.
    The features take at most `reserved_bytes` of memory. In models that encode whole prompts, the cache for the
    features of single images takes a quarter of `reserved_bytes`."""

    def __init__(self, encoder: MediaEncoder, reserved_bytes: int) -> None:
        self.epoch = 0
        if encoder.takes_prompts:
            encoder.known = PictureRows(reserved_bytes // 4)
        self.reserved_bytes = reserved_bytes
        self.max_bytes = reserved_bytes - encoder.known.max_bytes
        self.encoder = encoder
        self._lock = threading.Lock()
        self._num_clears = 0
        self.kept_features: dict[bytes, Features] = {}

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row of features."""
        return self.encoder.row_bytes

    def num_bytes(self, medium: MultiModalItem) -> int:
        return medium.num_rows * self.row_bytes

    def encode(self, medium: MultiModalItem) -> None:
        """Encode one image or other medium. On a CPU, the method waits for the running step, because both need all
        cores. On a CPU, the encoding runs in a temporary thread (see `bridle.threads`)."""
        num_clears = self._num_clears
        if self.encoder.is_on_cpu:
            features = run_after(lambda: self.encoder.encode(medium), "bridle-encode")
        else:
            features = self.encoder.encode(medium)
        with self._lock:
            if num_clears == self._num_clears:
                self.kept_features[medium.key] = features

    def together(self, media: Sequence[MultiModalItem]) -> list[MultiModalItem]:
        """Return the first of `media`, and the other media that can be encoded together with the first. On a CPU each
        medium is encoded alone, because batching gains little there. The features of an image on a CPU therefore have
        the same bits whatever other images there are."""
        first, found, num_bytes = media[0], list(media[:1]), media[0].num_bytes
        for other in () if self.encoder.is_on_cpu else media[1:]:
            if not alike(first, other):
                continue
            num_bytes += other.num_bytes
            if len(found) == MAX_TOGETHER or num_bytes > MAX_TOGETHER_BYTES:
                break
            found.append(other)
        return found

    def encode_all(self, media: Sequence[MultiModalItem]) -> None:
        num_clears = self._num_clears
        features = self.encoder.encode_all(media)
        with self._lock:
            if num_clears == self._num_clears:
                self.kept_features.update(zip((medium.key for medium in media), features, strict=True))

    def drop(self, key: bytes) -> None:
        self.kept_features.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._num_clears += 1
            self.kept_features.clear()
        self.encoder.known.clear()

    def features(self, key: bytes) -> Features:
        """Return the features of the medium with this key, which a step needs. Raises `InternalError` if the features
        are missing."""
        found = self.kept_features.get(key)
        if found is None:
            raise InternalError(f"the plan needs image {key.hex()}, whose embeddings are not on the device")
        return found
