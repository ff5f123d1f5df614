"""Decides which part of a growing output is sent to the client while its tokens can still be rolled back.

Wire formats differ in how they report a rollback. The policy `hold` never shows text that may still be rolled back. The
policy `hold` is for formats that cannot report a rollback. The policy `event` shows all text at once and reports
rollbacks. The policy `mark` shows all text, and adds a mark where text was rolled back (as AICI does). A request
without a controller has no rollbacks, so none of its text is held back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from bridle.controllers.composition import announced_rewind
from bridle.engine.request import Request
from bridle.errors import ControllerError
from bridle.outputs import Event, Logprob, Rewind
from bridle.serving.outputs.output_collector import GrowingOutput, OutputCollector

REWIND_MARK = " \u21a9 "


class RewindPolicy(str, Enum):
    """How a front end handles text that may be rolled back."""

    HOLD = "hold"
    EVENT = "event"
    MARK = "mark"


@dataclass(slots=True)
class Delta:
    """A new part of one output. A reader of a delta first rolls back `taken_tokens` tokens and `taken_chars`
    characters, and then appends `tokens` and `text`. `start` is the position in the output of the first token of
    `tokens`. Only the last delta of an output has `is_last`. A delta must not be changed. Deltas are not frozen,
    because freezing costs a microsecond."""

    index: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob | None, ...] = ()
    start: int = 0
    taken_tokens: int = 0
    taken_chars: int = 0
    is_first: bool = False
    is_last: bool = False


def max_rewind_of(request: Request) -> int | None:
    """Return how many tokens the controller of a request may roll back at once; None if this is unknown.

    A controller states the number of tokens in an attribute or property `max_rewind`. With `max_rewind` 0, the
    controller never rolls back, and its text streams like text without a controller. A request may also ask that
    unlikely text is rolled back. For a request that asks for this, the number of tokens is unknown.
    """
    if request.sampling.takes_text_back and request.controller is not None:
        return None
    return 0 if request.controller is None else announced_rewind(request.controller)


def split_at_rewinds(events: Iterable[Event]) -> list[list[Event]]:
    """Split a list of events, so that a new list begins at each rollback. A reader that marks rollbacks reads the
    collector after each list. So the reader's output does not depend on how many events arrive together."""
    pieces: list[list[Event]] = [[]]
    for event in events:
        if isinstance(event, Rewind) and pieces[-1]:
            pieces.append([])
        pieces[-1].append(event)
    return pieces


class DeltaReader:
    """Reads the outputs of a collector as deltas, according to a `RewindPolicy`. A collector can have only one
    reader."""

    def __init__(self, collector: OutputCollector, policy: RewindPolicy = RewindPolicy.HOLD) -> None:
        self._collector = collector
        self._policy = policy
        self._max_rewind = max_rewind_of(collector.request)
        self._shown: dict[int, _Shown] = {}

    @property
    def shows_all(self) -> bool:
        """Return whether all text is shown as soon as it is generated."""
        return self._policy is not RewindPolicy.HOLD or self._max_rewind == 0

    def skip(self) -> None:
        """Count all text so far as shown."""
        for index, growing in self._collector.growing.items():
            shown = self._shown.setdefault(index, _Shown())
            shown.num_tokens, shown.num_chars = len(growing.output.token_ids), len(growing.output.text)
            growing.low_tokens, growing.low_chars = shown.num_tokens, shown.num_chars

    def read(self) -> list[Delta]:
        """Return the deltas that may be shown since the last call. Each output has at most one delta, and the deltas
        are in the order of the outputs' indexes. With the policy `hold`, raises `ControllerError` if a controller
        rolled back more tokens than it stated."""
        deltas = (self._read(index, growing) for index, growing in sorted(self._collector.growing.items()))
        return [delta for delta in deltas if delta is not None]

    def _read(self, index: int, growing: GrowingOutput) -> Delta | None:
        is_first = index not in self._shown
        shown = self._shown.setdefault(index, _Shown())
        if shown.is_over:
            return None
        taken_tokens, taken_chars = self._taken(shown, growing)
        start, begin = shown.num_tokens - taken_tokens, shown.num_chars - taken_chars
        num_tokens, num_chars = self._showable(growing)
        shown.num_tokens, shown.num_chars = max(num_tokens, start), max(num_chars, begin)
        output = growing.output
        shown.is_over = output.finish_reason is not None
        text = output.text[begin : shown.num_chars]
        if self._policy is RewindPolicy.MARK and taken_tokens:
            text = REWIND_MARK + text
        tokens = tuple(output.token_ids[start : shown.num_tokens])
        if not (is_first or shown.is_over or tokens or text or taken_tokens or taken_chars):
            return None
        logprobs = () if output.logprobs is None else tuple(output.logprobs[start : shown.num_tokens])
        return Delta(index, text, tokens, logprobs, start, taken_tokens, taken_chars, is_first, shown.is_over)

    def _taken(self, shown: _Shown, growing: GrowingOutput) -> tuple[int, int]:
        """Return how many shown tokens and characters were rolled back since the last call."""
        taken_tokens = max(shown.num_tokens - growing.low_tokens, 0)
        taken_chars = max(shown.num_chars - growing.low_chars, 0)
        growing.low_tokens, growing.low_chars = len(growing.output.token_ids), len(growing.output.text)
        if self._policy is RewindPolicy.HOLD and (taken_tokens or taken_chars):
            raise ControllerError(
                f"the controller rolled back {taken_tokens} tokens that were sent; it had announced to roll back at "
                f"most {self._max_rewind} tokens"
            )
        return taken_tokens, taken_chars

    def _showable(self, growing: GrowingOutput) -> tuple[int, int]:
        """Return how many tokens and characters of an output may be shown."""
        output = growing.output
        if self.shows_all or output.finish_reason is not None:
            return len(output.token_ids), len(output.text)
        if self._max_rewind is None:
            return 0, 0
        num_tokens = max(len(output.token_ids) - self._max_rewind, 0)
        return num_tokens, growing.ends[num_tokens - 1] if num_tokens else 0


@dataclass(slots=True)
class _Shown:
    num_tokens: int = 0
    num_chars: int = 0
    is_over: bool = False
