"""The simulated clients, and their entry to the service: admission and fairness as in a server, then the replicas.

A client chats: it reads an answer to its end, waits as if thinking, and asks again. A client that is refused tries
again after the time that the refusal names. Every token is compared with the workload's script, which detects tokens
that are lost, repeated or from another request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bridle.distributed.replica_messages import WireEvent
from bridle.distributed.replicas import ReplicaSet
from bridle.engine.client import EventStream
from bridle.engine.request import Request
from bridle.engine.sequence import root_key
from bridle.errors import InternalError, Overloaded
from bridle.outputs import Finished, FinishReason, PromptEvent, TokenEvent
from bridle.sampling import SamplingParams
from bridle.serving.tenancy.admission import Admission, Ticket
from dev.simulation.records import Records
from dev.simulation.timeline import Timeline
from dev.simulation.workload import SimulatedTurn, Workload, drawn_token, first_of_answer

#: Maximum number of attempts of a refused client.
_MAX_TRIES = 20


@dataclass(slots=True)
class _Asked:
    """A chat turn whose answer is not complete yet. The client has received `num_tokens` of its tokens, or knows that
    they were sent."""

    turn: SimulatedTurn
    began: float
    num_tries: int = 0
    stream: EventStream | None = None
    ticket: Ticket | None = None
    first_at: float | None = None
    num_tokens: int = 0
    num_cached: int = 0


class Clients:
    """All simulated clients of a workload. With `tells_all`, replicas report every token; otherwise they report only
    some tokens."""

    def __init__(
        self, timeline: Timeline, workload: Workload, replicas: ReplicaSet, admission: Admission, tells_all: bool
    ) -> None:
        self.records = Records()
        self._timeline = timeline
        self._replicas = replicas
        self._admission = admission
        self._tells_all = tells_all
        self._num_unasked = workload.num_requests
        self._arrivals, self._chats = workload.arrivals(), workload.chats()
        self._asked: dict[str, _Asked] = {}

    @property
    def is_done(self) -> bool:
        """Return whether all turns of all chats are answered."""
        return not (self._num_unasked or self._asked)

    def turn_of(self, request_id: str) -> SimulatedTurn:
        """Return the unanswered turn whose request has this id."""
        return self._asked[request_id].turn

    def start(self) -> None:
        """Schedule the beginning of the first chat."""
        self._timeline.at(next(self._arrivals), self._arrive)

    def _arrive(self) -> None:
        turn = next(self._chats).next_turn()
        if turn is not None:
            self._ask(turn)
        if self._num_unasked:
            self._timeline.at(next(self._arrivals), self._arrive)

    def _ask(self, turn: SimulatedTurn) -> None:
        if self._num_unasked:
            self._num_unasked -= 1
            self._asked[turn.id] = _Asked(turn, self._timeline.now)
            self._try(self._asked[turn.id])

    def _try(self, asked: _Asked) -> None:
        turn = asked.turn
        asked.num_tries += 1
        sampling = SamplingParams(max_tokens=turn.num_output, ignore_eos=True, seed=turn.seed)
        try:
            asked.ticket = self._admission.admit(user=turn.chat.user)
            place = asked.ticket.charge(len(turn.prompt), turn.num_output)
            request = Request(turn.id, turn.prompt, sampling, place=place, detokenize=False)
            asked.stream = self._replicas.submit(request)
        except Overloaded as error:
            self._turn_away(asked, error.retry_after)

    def _turn_away(self, asked: _Asked, retry_after: float) -> None:
        self.records.num_turned_away += 1
        if asked.ticket is not None:
            asked.ticket.release()
        if asked.num_tries < _MAX_TRIES:
            self._timeline.after(retry_after, self._try, asked)
        else:
            self._give_up(asked)

    def _give_up(self, asked: _Asked) -> None:
        del self._asked[asked.turn.id]
        self.records.num_failed += 1
        self._stop_if_done()

    # -- answers ---------------------------------------------------------------------------------------------

    def look(self, events: Iterable[WireEvent]) -> None:
        """Read the answers to the requests of these events."""
        for request_id in dict.fromkeys(event.request_id for event in events):
            if (asked := self._asked.get(request_id)) is not None:
                self._read(asked)

    def look_everywhere(self) -> None:
        """Read the answers to all requests."""
        for asked in list(self._asked.values()):
            self._read(asked)

    def _read(self, asked: _Asked) -> None:
        events = asked.stream.read_nowait() if asked.stream is not None else None
        if not events:
            return
        for event in events:
            if isinstance(event, TokenEvent):
                self._read_token(asked, event)
            elif isinstance(event, PromptEvent):
                asked.num_cached = event.num_cached
            elif isinstance(event, Finished):
                self._end(asked, event)

    def _read_token(self, asked: _Asked, event: TokenEvent) -> None:
        turn = asked.turn
        if asked.first_at is None:
            asked.first_at = self._timeline.now
        expected = drawn_token(root_key(turn.seed), asked.num_tokens)
        if event.token != expected or asked.num_tokens >= turn.num_output:
            raise InternalError(
                f"request {turn.id} got {event.token} as token {asked.num_tokens} of {turn.num_output}, not {expected}"
            )
        asked.num_tokens += 1

    def _end(self, asked: _Asked, event: Finished) -> None:
        turn, now = asked.turn, self._timeline.now
        if asked.ticket is not None:
            asked.ticket.num_output = event.usage.completion_tokens + event.usage.rewound_tokens
            asked.ticket.release()
        if event.reason is FinishReason.ERROR:
            self._give_up(asked)
            return
        told = asked.num_tokens if self._tells_all else event.usage.completion_tokens
        if told != turn.num_output or asked.first_at is None or event.reason is not FinishReason.LENGTH:
            raise InternalError(
                f"request {turn.id} ended with {told} tokens of {turn.num_output}: {event.reason.value}"
            )
        del self._asked[turn.id]
        self.records.add(
            asked.began, asked.first_at, now, turn.num_prompt, asked.num_cached, turn.num_output, asked.num_tries
        )
        pause = turn.chat.note_answer(first_of_answer(root_key(turn.seed)), turn.num_output)
        self._timeline.after(pause, self._go_on, turn)
        self._stop_if_done()

    def _go_on(self, turn: SimulatedTurn) -> None:
        following = turn.chat.next_turn()
        if following is not None:
            self._ask(following)

    def _stop_if_done(self) -> None:
        if self.is_done:
            self._timeline.stop()
