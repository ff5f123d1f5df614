"""Slowdown of text streams while an image is encoded, and the speed of that encoding.

A pair consists of two turns: one lasts until an image is encoded, and the other has the same number of steps and no
image. These turns alternate, so that other work on the machine affects both. The reported ratio is the median over all
pairs. Each step computes only single tokens, so the cost of the image's own tokens in a step is not included.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import TYPE_CHECKING, Any

from bridle.errors import InternalError

if TYPE_CHECKING:
    from bridle.engine.multimodal.multimodal_inputs import MultiModalItem
    from dev.bench.images_peers import Ours

#: Steps in which a stream still computes its prompt, and the minimum steps of a turn.
_FIRST_STEPS, _LEAST_STEPS = 4, 4
#: A turn ends after this many steps even if the image is not encoded. The figures then show that the encoding was
#: starved.
_MOST_STEPS = 4_000


@dataclass(slots=True)
class _Turn:
    """Seconds of clock time and of the stepping thread's processor time, for each step of a turn."""

    clock: list[float]
    processor: list[float]


class BackgroundStreams:
    """Some text streams, each of which is restarted when it ends."""

    def __init__(self, ours: Ours, num_streams: int, num_tokens: int) -> None:
        self._ours, self._num_streams, self._num_tokens = ours, num_streams, num_tokens
        self._seeds = count(300)

    def steps(self, goes_on: Callable[[int], bool]) -> _Turn:
        """Run steps while `goes_on(number of steps so far)` is true."""
        turn = _Turn([], [])
        while goes_on(len(turn.clock)):
            self._begin()
            began, processor = time.perf_counter(), time.thread_time()
            self._ours.step()
            turn.clock.append(time.perf_counter() - began)
            turn.processor.append(time.thread_time() - processor)
        return turn

    def _begin(self) -> None:
        if not self._ours.engine.has_work:
            for _ in range(self._num_streams):
                self._ours.engine.add(self._ours.request(self._ours.prompt(0, next(self._seeds)), self._num_tokens))
            for _ in range(_FIRST_STEPS):
                self._ours.step()

    def close(self) -> None:
        """Run all streams to their end."""
        while self._ours.engine.has_work:
            self._ours.step()


class _Encoding:
    """Encoding of one image in a separate thread, as in the engine's encoder cache."""

    def __init__(self, ours: Ours, medium: MultiModalItem) -> None:
        self.seconds = 0.0
        self._media, self._medium = ours.media, medium
        self._thread = threading.Thread(target=self._run, name="bench-encode")
        self._thread.start()

    def _run(self) -> None:
        began = time.perf_counter()
        self._media.encode(self._medium)
        self.seconds = time.perf_counter() - began
        self._media.drop(self._medium.key)

    @property
    def is_done(self) -> bool:
        return self.seconds > 0

    def join(self) -> None:
        self._thread.join()
        if not self.is_done:
            raise InternalError("the picture could not be encoded")


def measure_neighbours(ours: Ours, num_streams: int, num_tokens: int, num_pairs: int) -> dict[str, Any]:
    """Return the inter-token latencies of `num_streams` streams with and without an image, in `num_pairs` pairs of
    turns. Also return the speed of image encoding relative to encoding without streams."""
    streams = BackgroundStreams(ours, num_streams, num_tokens)
    (medium,) = ours.prompt(1, 500).sights.media
    alone = [_encoded_alone(ours, medium) for _ in range(3)]
    pairs: list[tuple[_Turn, _Turn]] = []
    beside: list[float] = []
    for _ in range(num_pairs):
        seen, seconds = _beside(ours, streams, medium)
        pairs.append((seen, streams.steps(len(seen.clock).__gt__)))
        beside.append(seconds)
    streams.close()
    return {
        "streams": num_streams,
        "pairs": num_pairs,
        "alone": _figures([gap for _, plain in pairs for gap in plain.clock]),
        "beside": _figures([gap for seen, _ in pairs for gap in seen.clock]),
        "ratio": median(median(seen.clock) / median(plain.clock) for seen, plain in pairs),
        "processor_ratio": median(median(seen.processor) / median(plain.processor) for seen, plain in pairs),
        "picture_share": median(alone) / median(beside),
    }


def _beside(ours: Ours, streams: BackgroundStreams, medium: MultiModalItem) -> tuple[_Turn, float]:
    """Run the turn in which an image is encoded; return the turn and the seconds of the encoding."""
    encoding = _Encoding(ours, medium)
    turn = streams.steps(lambda done: done < _LEAST_STEPS or (done < _MOST_STEPS and not encoding.is_done))
    encoding.join()
    return turn, encoding.seconds


def _encoded_alone(ours: Ours, medium: MultiModalItem) -> float:
    encoding = _Encoding(ours, medium)
    encoding.join()
    return encoding.seconds


def _figures(gaps: list[float]) -> dict[str, float]:
    return {"median_gap": median(gaps), "longest_gap": max(gaps)}
