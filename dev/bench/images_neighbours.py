"""Slowdown of text streams while an image is encoded, and the speed of that encoding.

A pair of turns is one with an image, which lasts until the image is encoded, and one with the same number of steps and
no image. They alternate, so that other work of the machine affects both, and the ratio is the median over pairs. Steps
compute only single tokens, so the cost of the image's own rows in a step is not included.
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

#: Steps in which a stream still reads its prompt, and those of the shortest turn.
_FIRST_STEPS, _LEAST_STEPS = 4, 4
#: A turn ends after so many steps though the picture is not done: then it is starved, which the figures tell.
_MOST_STEPS = 4_000


@dataclass(slots=True)
class _Turn:
    """Seconds by the clock, and of the stepping thread's processor time, for each step."""

    clock: list[float]
    processor: list[float]


class BackgroundStreams:
    """Some streams of text, started again when they are over."""

    def __init__(self, ours: Ours, num_streams: int, num_tokens: int) -> None:
        self._ours, self._num_streams, self._num_tokens = ours, num_streams, num_tokens
        self._seeds = count(300)

    def steps(self, goes_on: Callable[[int], bool]) -> _Turn:
        """Step while `goes_on(steps so far)`."""
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
        """Run to the end."""
        while self._ours.engine.has_work:
            self._ours.step()


class _Encoding:
    """One image that is encoded in a thread, as the engine's pool has it done."""

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
    """Gaps between tokens of `num_streams` streams with and without an image, in `num_pairs` pairs of turns; and the
    speed of encoding as a share of its speed alone."""
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
    """The turn in which an image is encoded, and the seconds that it takes."""
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
