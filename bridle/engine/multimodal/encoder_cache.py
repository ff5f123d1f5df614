"""Decides which image features stay on the model's device, and computes the features of further images in a thread.

Features take a limited number of bytes; the least recently used are evicted first. Features that a step uses stay until
the next step begins. If the most urgent image without features has no room for them, features of less urgent sequences
are evicted. So sequences never block each other. The device (`MediaDevice`) encodes images and stores features. The
device may be in another process. After a loss of the device, the features that are needed are computed again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridle.engine.interfaces import BatchedMedia, MediaDevice
from bridle.engine.multimodal.multimodal_inputs import MultiModalItem
from bridle.errors import BridleError, InternalError, Overloaded, ShardUnavailable

_log = logging.getLogger(__name__)

#: Maximum number of bytes of all images of unfinished requests, as arrays for the encoder.
MAX_HELD_BYTES = 1 << 30
#: Pause before the next attempt to use a device that could not be reached, in seconds.
AWAY_SECONDS = 0.2


class EncoderCache:
    """Implements `bridle.engine.interfaces.MediaStore` over a device. `on_change` is called, by a thread of the pool,
    when the encoding of an image has ended, with or without an error."""

    def __init__(self, device: MediaDevice) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._device = device
        self._batched = device if isinstance(device, BatchedMedia) else None
        self._epoch = device.epoch
        self._changed = threading.Condition()
        self._known: dict[bytes, MultiModalItem] = {}
        self._num_users: Counter[bytes] = Counter()
        self._placed: OrderedDict[bytes, int] = OrderedDict()  # bytes on the device; least recently used first
        self._wanted: list[bytes] = []  # the most urgent first
        self._pinned: set[bytes] = set()
        self._failures: dict[bytes, BridleError] = {}  # not reported yet
        self._failed: set[bytes] = set()  # failed media of live requests
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._num_encoded = self._num_found = 0
        self._seconds = 0.0

    # -- for the engine ------------------------------------------------------------------------------------------

    def check(self, media: Sequence[MultiModalItem]) -> None:
        """Raise the device's errors for images that it cannot encode. Raises `Overloaded` if the images of unfinished
        requests would together take too much memory."""
        with self._changed:
            held = sum(medium.num_bytes for medium in self._known.values())
            new = sum(medium.num_bytes for medium in media if medium.key not in self._known)
        if held and held + new > MAX_HELD_BYTES:
            raise Overloaded(f"the images of running requests take {held} bytes; at most {MAX_HELD_BYTES}")

    def open(self, medium: MultiModalItem) -> None:
        with self._changed:
            self._known[medium.key] = medium
            self._num_users[medium.key] += 1
            self._num_found += medium.key in self._placed

    def leave(self, key: bytes) -> None:
        with self._changed:
            self._num_users[key] -= 1
            if not self._num_users[key]:
                del self._num_users[key], self._known[key]
                self._failed.discard(key)
                self._failures.pop(key, None)

    def begin_step(self, keys: Sequence[bytes]) -> set[bytes]:
        with self._changed:
            self._note_loss()
            self._wanted = [key for key in keys if key not in self._placed and key not in self._failed]
            self._pinned = {key for key in keys if key in self._placed}
            for key in reversed(keys):
                if key in self._placed:
                    self._placed.move_to_end(key)
            if self._wanted:
                self._give_way(keys)
                self._start()
                self._changed.notify_all()
            return set(self._pinned)

    def take_failures(self) -> Mapping[bytes, BridleError]:
        if not self._failures:
            return {}
        with self._changed:
            failures, self._failures = self._failures, {}
            return failures

    def counts(self) -> Mapping[str, Any]:
        with self._changed:
            return {
                "num_media_encoded": self._num_encoded,
                "num_media_found": self._num_found,
                "media_seconds": self._seconds,
                "media_bytes": sum(self._placed.values()),
                "media_held_bytes": sum(medium.num_bytes for medium in self._known.values()),
            }

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # -- called with the lock held -------------------------------------------------------------------------------

    def _note_loss(self) -> None:
        """Forget all features if the device was lost and is now available again."""
        if self._epoch != self._device.epoch:
            self._epoch = self._device.epoch
            self._placed.clear()
            self._pinned.clear()

    def _give_way(self, keys: Sequence[bytes]) -> None:
        """Release the features of this step's least urgent images if the first image without features has no room."""
        first = self._wanted[0]
        size = self._device.num_bytes(self._known[first])
        for key in reversed(keys[keys.index(first) + 1 :]):
            if self._has_room(size):
                return
            self._pinned.discard(key)

    def _has_room(self, size: int) -> bool:
        """Return whether `size` more bytes fit on the device next to the features of this step. Features that exceed
        the device's limit are accepted if the device has no other features."""
        kept = sum(self._placed[key] for key in self._pinned)
        return not self._pinned or kept + size <= self._device.max_bytes

    def _leavers(self, size: int) -> list[bytes]:
        """Remove features from the records until `size` more bytes fit on the device. Returns their keys."""
        used, leavers = sum(self._placed.values()), []
        for key in list(self._placed):
            if used + size <= self._device.max_bytes:
                break
            if key not in self._pinned:
                used -= self._placed.pop(key)
                leavers.append(key)
        return leavers

    def _next(self) -> list[MultiModalItem]:
        """Return the most urgent image that can be encoded now, with the other images to encode in the same call."""
        self._note_loss()
        media = [self._known[key] for key in self._wanted if self._is_missing(key)]
        if not media or not self._has_room(self._device.num_bytes(media[0])):
            return []
        if self._batched is None or len(media) == 1:
            return media[:1]
        first, *others = self._batched.together(media)
        found, used = [first], sum(self._placed[key] for key in self._pinned) + self._device.num_bytes(first)
        for other in others:
            used += self._device.num_bytes(other)
            if used > self._device.max_bytes:
                break
            found.append(other)
        return found

    def _is_missing(self, key: bytes) -> bool:
        return key in self._known and key not in self._placed and key not in self._failed

    def _start(self) -> None:
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="bridle-media", daemon=True)
            self._thread.start()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (media := self._next()) and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                sizes, epoch = [self._device.num_bytes(medium) for medium in media], self._epoch
                leavers = self._leavers(sum(sizes))
            began = time.perf_counter()
            try:
                for key in leavers:
                    self._device.drop(key)
                errors = self._encode_all(media)
            except ShardUnavailable:  # the picture is not at fault: it is encoded later
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, AWAY_SECONDS)
                continue
            with self._changed:
                self._seconds += time.perf_counter() - began
                for medium, size, error in zip(media, sizes, errors, strict=True):
                    self._note(medium.key, size if epoch == self._device.epoch else None, error)
            self.on_change()

    def _encode_all(self, media: Sequence[MultiModalItem]) -> list[BridleError | None]:
        """Encode images, in one call if there are several. Returns one entry for each image: its error if it failed,
        else None."""
        if self._batched is not None and len(media) > 1:
            try:
                self._batched.encode_all(media)
            except Exception as fault:  # the cause may be one of the images, or their number
                _log.info(
                    "%d images cannot be encoded as one batch and are encoded one by one: %s: %s",
                    len(media),
                    type(fault).__name__,
                    fault,
                )
            else:
                return [None] * len(media)
        return [self._encode(medium) for medium in media]

    def _encode(self, medium: MultiModalItem) -> BridleError | None:
        """Encode one image. Returns the error if encoding failed, else None."""
        try:
            self._device.encode(medium)
        except ShardUnavailable:
            raise
        except BridleError as refusal:
            return refusal
        except Exception as fault:
            _log.exception("image %s", medium.key.hex())
            return InternalError(f"the picture could not be encoded: {type(fault).__name__}: {fault}")
        return None

    def _note(self, key: bytes, size: int | None, error: BridleError | None) -> None:
        """Record the result of encoding an image. `size` is None if the device was lost meanwhile. The caller must hold
        this object's lock."""
        if error is None:
            self._num_encoded += 1
            if size is not None:
                self._placed[key] = size
        elif key in self._known:
            self._failed.add(key)
            self._failures[key] = error
