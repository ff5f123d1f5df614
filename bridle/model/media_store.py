"""Keeps the features of pictures where the model computes, and has them encoded by a thread beside the steps.

Features stay within a number of bytes; the least recently used leave first. What the step under way reads stays until
the next one begins. When there is no room for the most urgent missing picture, those of less urgent sequences give way,
so that nobody waits for room that somebody else waits with.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridle.engine.media import Medium
from bridle.errors import BridleError, InternalError, Overloaded
from bridle.model.media_encoder import Features, MediaEncoder

_log = logging.getLogger(__name__)

#: What the pictures of requests that are not over may take together, as the numbers that a model reads.
MAX_HELD_BYTES = 1 << 30


class LocalMediaStore:
    """Implements `bridle.engine.interfaces.MediaStore` over an encoder in this process. `on_change` is called, by a
    thread of the store, when a picture is there or failed."""

    def __init__(self, encoder: MediaEncoder, max_bytes: int) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.max_bytes = max_bytes
        self._encoder = encoder
        self._changed = threading.Condition()
        self._known: dict[bytes, Medium] = {}
        self._num_users: Counter[bytes] = Counter()
        self._features: OrderedDict[bytes, Features] = OrderedDict()  # least recently used first
        self._wanted: list[bytes] = []  # the most urgent first
        self._pinned: set[bytes] = set()
        self._failures: dict[bytes, BridleError] = {}  # not told yet
        self._failed: set[bytes] = set()  # of those in use
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._num_encoded = self._num_found = 0
        self._seconds = 0.0

    # -- for the engine ------------------------------------------------------------------------------------------

    def check(self, media: Sequence[Medium]) -> None:
        """Every picture that was made ready for this model can be tried; but requests keep theirs until they are over,
        and so `Overloaded` is raised where they would take too much memory together."""
        with self._changed:
            held = sum(medium.num_bytes for medium in self._known.values())
            new = sum(medium.num_bytes for medium in media if medium.key not in self._known)
        if held and held + new > MAX_HELD_BYTES:
            raise Overloaded(f"the pictures of running requests take {held} bytes; at most {MAX_HELD_BYTES}")

    def open(self, medium: Medium) -> None:
        with self._changed:
            self._known[medium.key] = medium
            self._num_users[medium.key] += 1
            self._num_found += medium.key in self._features

    def leave(self, key: bytes) -> None:
        with self._changed:
            self._num_users[key] -= 1
            if not self._num_users[key]:
                del self._num_users[key], self._known[key]
                self._failed.discard(key)
                self._failures.pop(key, None)

    def begin_step(self, keys: Sequence[bytes]) -> set[bytes]:
        with self._changed:
            self._wanted = [key for key in keys if key not in self._features and key not in self._failed]
            self._pinned = {key for key in keys if key in self._features}
            for key in reversed(keys):
                if key in self._features:
                    self._features.move_to_end(key)
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
        return {
            "num_media_encoded": self._num_encoded,
            "num_media_found": self._num_found,
            "media_seconds": self._seconds,
        }

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._features.clear()

    # -- for the model -------------------------------------------------------------------------------------------

    def features(self, key: bytes) -> Features:
        """Those of a picture that the step's plan names. Raises `InternalError` if they are not there."""
        found = self._features.get(key)
        if found is None:
            raise InternalError(f"the plan names picture {key.hex()}, whose features are not on the device")
        return found

    # -- with the lock held --------------------------------------------------------------------------------------

    def _give_way(self, keys: Sequence[bytes]) -> None:
        """Let go of the least urgent pictures of this step, where the first missing one has no room beside them."""
        first = self._wanted[0]
        size = self._encoder.num_bytes(self._known[first])
        for key in reversed(keys[keys.index(first) + 1 :]):
            if self._has_room(size):
                return
            self._pinned.discard(key)

    def _has_room(self, size: int) -> bool:
        """Whether so many bytes fit beside what must stay. What fits nowhere is taken in when it is alone."""
        kept = sum(self._features[key].num_bytes for key in self._pinned)
        return not self._pinned or kept + size <= self.max_bytes

    def _make_room(self, size: int) -> None:
        used = sum(features.num_bytes for features in self._features.values())
        for key in list(self._features):
            if used + size <= self.max_bytes:
                return
            if key not in self._pinned:
                used -= self._features.pop(key).num_bytes

    def _next(self) -> Medium | None:
        """The most urgent picture that can be encoded now."""
        for key in self._wanted:
            medium = self._known.get(key)
            if medium is None or key in self._features or key in self._failed:
                continue
            return medium if self._has_room(self._encoder.num_bytes(medium)) else None
        return None

    def _start(self) -> None:
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="bridle-media", daemon=True)
            self._thread.start()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while (medium := self._next()) is None and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
            assert medium is not None
            self._take_in(medium)
            self.on_change()

    def _take_in(self, medium: Medium) -> None:
        """Encode one picture and keep its features, or why it has none."""
        began = time.perf_counter()
        error: BridleError | None = None
        try:
            features = self._encoder.encode(medium)
        except BridleError as refusal:
            error = refusal
        except Exception as fault:
            _log.exception("picture %s", medium.key.hex())
            error = InternalError(f"the picture could not be encoded: {type(fault).__name__}: {fault}")
        with self._changed:
            self._seconds += time.perf_counter() - began
            if error is not None:
                if medium.key in self._known:
                    self._failed.add(medium.key)
                    self._failures[medium.key] = error
                return
            self._num_encoded += 1
            self._make_room(features.num_bytes)
            self._features[medium.key] = features
