"""Ends outputs that can no longer be among the best outputs of their request.

Outputs are compared by their mean log-probability. The sum of log-probabilities only falls. So an output's best
possible mean is its present sum divided by its maximum number of tokens. An output ends once enough finished outputs
have a better mean. The request returns the same outputs as it would without this module.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bridle.engine.outputs.output_processor import OutputProcessor
from bridle.engine.request import Request
from bridle.engine.sampling.sample_planner import Outputs
from bridle.engine.sequence import Sequence
from bridle.outputs import BY_ITSELF, Event, Finished, FinishReason, Forked, Rewind, TokenEvent

#: Sums of floats are not exact, so only outputs that are worse by more than this are ended.
_MARGIN = 1e-6


@dataclass(slots=True)
class Contest:
    """The log-probabilities of a request's outputs by index, and the mean log-probabilities of complete outputs, worst
    first."""

    num_wanted: int
    scores: dict[int, list[float]] = field(default_factory=dict)
    totals: dict[int, float] = field(default_factory=dict)
    means: list[float] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Record an event of an output."""
        match event:
            case TokenEvent():
                score = 0.0 if event.logprob is None else min(event.logprob.logprob, 0.0)
                self.scores.setdefault(event.index, []).append(score)
                self.totals[event.index] = self.totals.get(event.index, 0.0) + score
            case Forked():
                self._keep(event.index, self.scores.get(event.parent, [])[: event.num_tokens])
            case Rewind():
                scores = self.scores.get(event.index, [])
                self._keep(event.index, scores[: len(scores) - event.num_tokens])
            case Finished() if event.reason in BY_ITSELF or event.reason is FinishReason.LENGTH:
                scores = self.scores.get(event.index, [])
                insort(self.means, sum(scores) / len(scores) if scores else float("-inf"))

    def _keep(self, index: int, scores: list[float]) -> None:
        self.scores[index], self.totals[index] = list(scores), sum(scores)

    def is_lost(self, index: int, max_tokens: int) -> bool:
        """Return whether an output with at most `max_tokens` tokens can no longer be among the best."""
        if len(self.means) < self.num_wanted:
            return False
        return self.totals.get(index, 0.0) / max_tokens < self.means[-self.num_wanted] - _MARGIN


class BestOf:
    """The contests of active requests with `keep_best`. A contest decides which outputs a request returns."""

    def __init__(self, progress: OutputProcessor, outputs: Mapping[str, Outputs]) -> None:
        self._progress = progress
        self._outputs = outputs
        self.live: dict[str, Contest] = {}

    def open(self, request: Request) -> None:
        """Begin a contest for a request if it returns fewer outputs (`keep_best`) than it generates."""
        if request.sampling.keep_best < request.sampling.n:
            self.live[request.id] = Contest(request.sampling.keep_best)

    def end_losers(self, events: Iterable[Event]) -> None:
        """Record the events of a step, and end the outputs that cannot be among the best any more."""
        for event in list(events):
            if (contest := self.live.get(event.request_id)) is not None:
                contest.add(event)
        for request_id, contest in list(self.live.items()):
            if request_id not in self._outputs:
                del self.live[request_id]
                continue
            for seq in list(self._outputs[request_id].sequences.values()):
                max_tokens = seq.max_len - seq.num_prompt
                if not seq.is_over and contest.is_lost(seq.index, max_tokens):
                    self._end(seq, max_tokens)

    def _end(self, seq: Sequence, max_tokens: int) -> None:
        seq.output.usage.spared_tokens = max_tokens - seq.num_generated
        self._progress.finish(seq, FinishReason.OUTRANKED)
