"""Beam search: the `width` most probable continuations are kept until the best texts are known.

The beams of a request are its outputs: forks of one sequence, which share the blocks of their common tokens. After each
token the pool compares the candidates of all beams and decides for all at once. A beam without a surviving continuation
is not ended: it rolls back its own tokens and follows another beam, so that there are never more than `width` beams.
The best texts are reported at the end, as a variable, because a text may be complete long before that.

The rules are those of transformers (`generate(num_beams=...)`): a finished text's score is the sum of its
log-probabilities, divided by its length to the power of `length_penalty`. The search ends when `width` texts are
finished and none can get better, or at once with `early_stopping` True. With False, the best possible score of a
running text uses its present length; with "never", the longest possible length.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from bridle.controllers.sync_pool import SyncControllerPool, opened
from bridle.engine.control.decision import Branch, Decision
from bridle.engine.interfaces import Answer, Ask, StoredValue
from bridle.engine.request import Request
from bridle.errors import InvalidRequest
from bridle.sampling import MAX_LOGPROBS

MAX_WIDTH = 32
#: Name of the variable with the texts: a list of score, token ids, and their log-probabilities, best first.
BEAMS = "beams"

EarlyStopping = bool | Literal["never"]
#: A finished text: score, tokens, and the log-probability of each token.
Found = tuple[float, tuple[int, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Parameters of a beam search: outputs of at most `max_tokens` tokens, each completed by one of `ends`."""

    width: int
    max_tokens: int
    ends: tuple[int, ...] = ()
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        most = min(MAX_WIDTH, MAX_LOGPROBS - len(self.ends))
        if isinstance(self.width, bool) or not isinstance(self.width, int) or not 1 <= self.width <= most:
            raise InvalidRequest(f"the beam width is {self.width!r}; must be between 1 and {most}", "best_of")
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {self.max_tokens}; must be at least 1", "max_tokens")
        is_number = isinstance(self.length_penalty, (int, float)) and not isinstance(self.length_penalty, bool)
        if not is_number or not -10.0 <= self.length_penalty <= 10.0:
            raise InvalidRequest(
                f"length_penalty is {self.length_penalty!r}; must be a number from -10 to 10", "length_penalty"
            )
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise InvalidRequest(
                f"early_stopping is {str(self.early_stopping)[:80]!r}; must be true, false or 'never'", "early_stopping"
            )

    @property
    def num_candidates(self) -> int:
        """Return how many of each beam's most probable tokens can affect the result."""
        return self.width + len(self.ends)

    @property
    def draw(self) -> Branch:
        """Return the branch that samples the most probable token. The token is replaced if another one is chosen."""
        return Branch(top_logprobs=self.num_candidates)


@dataclass(slots=True)
class _Beam:
    """One sequence: its decided tokens after the prompt with their log-probabilities, and its candidates. Only `real`
    beams are used: at first all beams are equal, so only one is real."""

    seq_id: int
    real: bool
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    score: float = 0.0
    drawn: int | None = None
    candidates: tuple[tuple[int, float], ...] = ()
    decision: Decision | None = None


@dataclass(frozen=True, slots=True)
class _Way:
    """A beam with one more token, as a possible continuation."""

    beam: _Beam
    token: int
    logprob: float
    score: float


@dataclass(slots=True)
class _Group:
    """The beams of a request, and the finished texts."""

    search: BeamSearch
    beams: dict[int, _Beam] = field(default_factory=dict)
    finished: list[Found] = field(default_factory=list)
    is_improvable: bool = True
    is_over: bool = False
    is_told: bool = False

    @property
    def is_ready(self) -> bool:
        """Return whether all beams have sampled a token."""
        return len(self.beams) == self.search.width and all(beam.drawn is not None for beam in self.beams.values())

    def advance(self) -> None:
        """Decide how all beams continue."""
        search = self.search
        ways = [
            _Way(beam, token, logprob, beam.score + logprob)
            for beam in self.beams.values()
            if beam.real
            for token, logprob in beam.candidates
        ]
        ways.sort(key=lambda way: -way.score)
        length = len(next(iter(self.beams.values())).tokens) + 1
        is_last = length >= search.max_tokens
        self._finish([way for way in ways[: search.width] if is_last or way.token in search.ends], length)
        running = [] if is_last else [way for way in ways if way.token not in search.ends][: search.width]
        self._judge(running, length)
        is_full = len(self.finished) == search.width
        if not running or not self.is_improvable or (is_full and search.early_stopping is True):
            self.is_over = True
            return
        self._spread(running)

    def _finish(self, ways: list[_Way], length: int) -> None:
        """Keep the best finished texts."""
        is_full = len(self.finished) == self.search.width
        if not self.is_improvable or (is_full and self.search.early_stopping is True):
            return
        for way in ways:
            score = way.score / length**self.search.length_penalty
            self.finished.append((score, (*way.beam.tokens, way.token), (*way.beam.logprobs, way.logprob)))
        self.finished.sort(key=lambda each: -each[0])
        del self.finished[self.search.width :]

    def _judge(self, running: list[_Way], length: int) -> None:
        """Update whether a beam can still get a better score than the worst finished text."""
        search = self.search
        if not running or len(self.finished) < search.width:
            return
        if search.early_stopping == "never" and search.length_penalty > 0.0:
            length = search.max_tokens
        best = running[0].score / length**search.length_penalty
        self.is_improvable = self.is_improvable and best > self.finished[-1][0]

    def _spread(self, running: list[_Way]) -> None:
        """Assign each continuation to a sequence: the first one of a beam to the beam's own sequence, the others to
        sequences without a continuation."""
        staying: dict[int, _Way] = {}
        moving: list[_Way] = []
        for way in running:
            if way.beam.seq_id in staying:
                moving.append(way)
            else:
                staying[way.beam.seq_id] = way
        free = [seq_id for seq_id in self.beams if seq_id not in staying]
        given = {**staying, **dict(zip(free, moving, strict=False))}
        self.beams = {seq_id: self._follow(beam, given.get(seq_id)) for seq_id, beam in self.beams.items()}

    def _follow(self, beam: _Beam, way: _Way | None) -> _Beam:
        """Return the beam with its continuation. If there are fewer continuations than beams, a beam without one waits
        and does not count."""
        has = (*beam.tokens, beam.drawn)
        if way is None:
            return _Beam(beam.seq_id, False, (*beam.tokens, beam.drawn or 0), (), 0.0, decision=self.sample)
        wanted = (*way.beam.tokens, way.token)
        num_common = next((i for i, (one, other) in enumerate(zip(has, wanted, strict=True)) if one != other), len(has))
        decision = (
            self.sample if num_common == len(has) else Decision.splice(len(has) - num_common, wanted[num_common:])
        )
        return _Beam(beam.seq_id, True, wanted, (*way.beam.logprobs, way.logprob), way.score, decision=decision)

    @property
    def sample(self) -> Decision:
        return Decision.fork([self.search.draw])

    def read_texts(self) -> tuple[StoredValue, ...]:
        """Return the finished texts once they are known, to the first caller only."""
        if self.is_told or not self.is_over:
            return ()
        self.is_told = True
        return (StoredValue(BEAMS, json.dumps(self.finished).encode()),)


class BeamPool(SyncControllerPool[_Group]):
    """A `ControllerPool` for `BeamSearch`. The pool answers at once, for all beams of a request together. A beam with
    more tokens than the other beams waits."""

    @property
    def num_searches(self) -> int:
        """Return the number of running searches."""
        return len(self._opened) + len({id(group) for group in self._live.values()})

    def accepts(self, controller: object) -> bool:
        return isinstance(controller, BeamSearch)

    def open(self, request: Request) -> Future[tuple[int, ...]]:
        assert isinstance(request.controller, BeamSearch)
        self._opened[request.id] = _Group(request.controller)
        return opened(request.prompt)

    def ask(self, asks: Sequence[Ask]) -> None:
        """Record the tokens that beams sampled, and decide for groups whose beams have all sampled."""
        for ask in asks:
            if ask.request is not None:
                group = self._live[ask.seq_id] = self._opened.pop(ask.request.id)
                group.beams[ask.seq_id] = _Beam(ask.seq_id, True)
                self._answers[ask.seq_id] = Answer(Decision.fork([group.search.draw] * group.search.width))
            elif ask.parent is not None and ask.parent in self._live:
                group = self._live[ask.seq_id] = self._live[ask.parent]
                group.beams[ask.seq_id] = _Beam(ask.seq_id, False)
        for ask in asks:
            if ask.request is None and ask.seq_id in self._live:
                self._note(ask, self._live[ask.seq_id])
        for ask in asks:
            if ask.request is None and ask.seq_id in self._live:
                self._answers[ask.seq_id] = self._answer(ask, self._live[ask.seq_id])

    @staticmethod
    def _note(ask: Ask, group: _Group) -> None:
        """Record the token that a beam sampled. The ask after a splice reports no sampled token, so its beam samples
        next."""
        beam = group.beams[ask.seq_id]
        if ask.sampled is not None:
            beam.drawn, beam.candidates, beam.decision = ask.sampled, ask.candidates or (), None
        elif ask.tokens or ask.backtrack:
            beam.decision = group.sample
        if not group.is_over and group.is_ready:
            group.advance()

    @staticmethod
    def _answer(ask: Ask, group: _Group) -> Answer:
        if ask.final:
            return Answer(stored=group.read_texts())
        if group.is_over:
            return Answer(Decision.stop(), stored=group.read_texts())
        decision, group.beams[ask.seq_id].decision = group.beams[ask.seq_id].decision, None
        return Answer(decision or Decision.wait())
