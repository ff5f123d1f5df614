"""Decides how far each sequence may be computed while its images are being encoded.

Encoding an image takes much longer than a step. So a `MediaStore` encodes images while steps run. Only images in the
next chunk of a sequence are requested: images in the prefix cache are not encoded again. A chunk ends before an image
that is not ready. A sequence skips the step if its next token belongs to an image that is not ready. While no request
has images, this module does no work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

from bridle.engine.interfaces import MediaStore
from bridle.engine.multimodal.multimodal_inputs import align_to_item, is_whole
from bridle.engine.request import Request
from bridle.engine.sequence import Sequence
from bridle.engine.sequence_state import SequenceStatus
from bridle.errors import BridleError, InvalidRequest, UnsupportedFeature


class EncoderScheduler:
    """Requests the images of the next step from `store` (None: a text-only model). A step computes at most `window`
    tokens, of which at most `prompt_window` belong to prompts."""

    def __init__(self, store: MediaStore | None = None, window: int = 1, prompt_window: int | None = None) -> None:
        self._store = store
        self._window = window
        self._prompt_window = window if prompt_window is None else prompt_window
        #: Live requests by the key of a medium. While it is empty, steps need no work for images.
        self.num_users: Counter[bytes] = Counter()
        self._ready: set[bytes] = set()
        self.crowded_out: set[int] = set()  # sequences whose next image did not fit into a step
        self._made_room_at = 0  # the last step in which such a sequence came first

    # -- requests ------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise `UnsupportedFeature` if this model encodes no images. Raise `InvalidRequest` for an image that can
        never be encoded. Safe from any thread."""
        if self._store is None:
            raise UnsupportedFeature("this model is served for text only", "media")
        self._store.check(request.media)
        has_whole = is_whole(request.runs, len(request.prompt))
        if has_whole and request.sampling.prompt_logprobs is not None:
            raise UnsupportedFeature(
                "prompt_logprobs: in this model the tokens of a prompt with images attend to later tokens, so they "
                "have no log-probabilities",
                "prompt_logprobs",
            )
        longest = max((run.length for run in request.runs if run.is_mutual), default=0)
        if longest > self._prompt_window:
            what = "a prompt with images" if has_whole else "an image"
            raise InvalidRequest(
                f"{what} takes {longest} tokens, which must be computed in one step; a step has at most "
                f"{self._prompt_window} prompt tokens (max_batch_prefill_tokens)",
                "media",
            )

    def open(self, request: Request) -> None:
        """Record that a request with images begins."""
        assert self._store is not None  # `check` has refused such requests otherwise
        for medium in request.media:
            self._store.open(medium)
            self.num_users[medium.key] += 1

    def leave(self, request: Request) -> None:
        """Record that a request with images has ended."""
        assert self._store is not None
        for medium in request.media:
            self._store.leave(medium.key)
            self.num_users[medium.key] -= 1
            if not self.num_users[medium.key]:
                del self.num_users[medium.key]

    def take_failures(self) -> Mapping[bytes, BridleError]:
        """Return the media in use that cannot be encoded, each with its error. The error of each medium is returned
        once."""
        return self._store.take_failures() if self.num_users and self._store is not None else {}

    def counts(self) -> Mapping[str, Any]:
        """Return the image counts for the statistics. Safe from any thread."""
        return {} if self._store is None else self._store.counts()

    def close(self) -> None:
        """Stop encoding. Idempotent."""
        if self._store is not None:
            self._store.close()

    # -- a step --------------------------------------------------------------------------------------------------

    def begin_step(
        self,
        running: Iterable[Sequence],
        next_in_line: Iterable[Sequence],
        waiting: Iterable[Sequence],
        cached: Callable[[Sequence], int],
    ) -> None:
        """Request the images of the next step. Sequences whose images are not ready skip the step. `cached` returns how
        many tokens of a waiting sequence need not be computed."""
        assert self._store is not None
        starts: dict[int, int] = {}
        wanted: dict[bytes, None] = {}
        running = list(running)
        for seq in chain(running, next_in_line):
            if not seq.runs or seq.is_held:
                continue
            is_running = seq.queue.status is SequenceStatus.RUNNING
            start = starts[seq.id] = seq.kv.num_computed if is_running else cached(seq)
            stop = align_to_item(seq.runs, start, min(start + self._window, seq.target))
            wanted.update((run.key, None) for run in seq.runs if run.position < stop and run.end > start)
        self._ready = self._store.begin_step(list(wanted))
        for seq in chain(running, waiting):
            if seq.runs:
                begin = starts.get(seq.id)
                seq.queue.awaits_media = begin is None or self._reach(seq, begin) <= begin

    def max_computable(self, seq: Sequence) -> int:
        """Return how many tokens of `seq` may be computed by the end of this step. `seq` must have images. Computing
        stops before the first token whose image features are not ready."""
        return self._reach(seq, seq.kv.num_computed)

    def _reach(self, seq: Sequence, start: int) -> int:
        for run in seq.runs:
            if run.end > start and run.key not in self._ready:
                return max(min(run.position, seq.target), start)
        return seq.target

    # -- images whose rows attend to each other ------------------------------------------------------------------

    def next_starved(self, ready: Iterable[Sequence], step: int) -> Sequence | None:
        """Return the sequence whose image did not fit into an earlier step. A sequence whose image did not fit gets as
        much of this step as it needs. A sequence gets this preference in at most every second step, so that other
        sequences continue."""
        if step < self._made_room_at + 2:
            return None
        first = next((seq for seq in ready if seq.id in self.crowded_out), None)
        if first is not None:
            self._made_room_at = step
            self.crowded_out.discard(first.id)
        return first

    def uncut(self, seq: Sequence, num_tokens: int, most: int) -> int:
        """Return how many tokens to compute instead of `num_tokens`, so that an image with mutual attention is not
        split. The number of tokens is at most `most`. The number is 0 if the next token belongs to an image with mutual
        attention that does not fit into this step."""
        start = seq.kv.num_computed
        whole = align_to_item(seq.runs, start, start + num_tokens) - start
        if whole <= max(num_tokens, most):
            return whole
        self.crowded_out.add(seq.id)
        return 0
