"""A model of a replica's engine, which runs a little Python code for each request instead of for each token.

The model makes the same step plans as `Scheduler`: running sequences come first, with one token each. Then prompts are
added in their order and in chunks, up to the token limit of a step. The model differs from the engine in three ways.
While all sequences decode, the model computes many steps at a time. The model counts tokens instead of storing them.
The model does not preempt: it admits a sequence only when all its blocks fit. Tokens are reported only when needed: the
first token, and all sampled tokens when the replica is lost.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bridle.distributed.replica_messages import CancelRequest, Submit, WireEvent, pack_event
from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.request import Request
from bridle.engine.sequence import root_key
from bridle.outputs import Finished, FinishReason, PromptEvent, TokenEvent, Usage
from dev.simulation.core import CoreWork
from dev.simulation.cost import SimulatedStepCost
from dev.simulation.quick_cache import Chain, Hold, QuickCache
from dev.simulation.workload import SimulatedTurn, drawn_token


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request in progress. `num_left` tokens of its prompt and earlier output are still to be computed."""

    request: Request
    turn: SimulatedTurn
    length: int  # number of tokens at its arrival
    num_left: int = 0
    hold: Hold | None = None
    last_step: int = 0  # number of the step in which it ends

    @property
    def num_before(self) -> int:
        """The number of output tokens that the client had before the request arrived at this replica."""
        return len(self.request.generated)

    @property
    def num_to_come(self) -> int:
        return self.turn.num_output - self.num_before


@dataclass(slots=True)
class _Stretch:
    """`num_steps` similar steps that start at `began`. The first step takes `first` seconds, and each later step `more`
    seconds longer than the one before."""

    began: float
    num_steps: int
    first: float
    more: float
    chunks: list[tuple[_Sequence, int]]

    def seconds(self, num_steps: int) -> float:
        return num_steps * self.first + self.more * num_steps * (num_steps - 1) / 2

    def steps_by(self, moment: float) -> int:
        """Return the number of steps that have begun by `moment`; the last one may still be running."""
        passed, first, more = moment - self.began, self.first, self.more
        if more > 0:
            half, square = first / more - 0.5, 2 * passed / more
            count = square / (math.sqrt(half * half + square) + half)
        else:
            count = passed / first
        return min(max(math.ceil(count - 1e-9), 1), self.num_steps)


class QuickCore:
    """A `Core` that models an engine. `turn_of` returns the chat turn of a request, by the request's id."""

    def __init__(self, info: ExecutorInfo, cost: SimulatedStepCost, turn_of: Callable[[str], SimulatedTurn]) -> None:
        self._info = info
        self._cost = cost
        self._turn_of = turn_of
        self._cache = QuickCache(info.num_blocks)
        self._work = CoreWork()
        self._live: dict[str, _Sequence] = {}
        self._cancelled: list[_Sequence] = []
        self._waiting: list[_Sequence] = []  # by turn
        self._prefilling: list[_Sequence] = []
        self._decoding: list[tuple[int, int, _Sequence]] = []  # heap by last step
        self._context = 0  # total context of all decoding sequences
        self._step = 0
        self._order = 0
        self._stretch: _Stretch | None = None
        self._events: list[WireEvent] = []

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @property
    def work(self) -> CoreWork:
        return self._work

    # -- coming ----------------------------------------------------------------------------------------------

    def take(self, messages: Sequence[Submit | CancelRequest]) -> None:
        for message in messages:
            if isinstance(message, CancelRequest):
                if (seq := self._live.get(message.id)) is not None:
                    self._cancelled.append(seq)
                continue
            request = message.request
            turn = self._turn_of(request.id)
            seq = _Sequence(request, turn, len(request.prompt) + len(request.generated))
            self._live[request.id] = seq
            insort(self._waiting, seq, key=_turn)

    def _chain(self, seq: _Sequence, num_tokens: int) -> Chain:
        size, chat = self._info.block_size, seq.turn.chat
        shared = min(chat.num_system_tokens, num_tokens) // size
        return ((-1 - chat.system, shared), (chat.number, num_tokens // size - shared))

    def _admit(self, seq: _Sequence) -> bool:
        chain = self._chain(seq, seq.length - 1)
        num_blocks = -(-(seq.length + seq.num_to_come) // self._info.block_size)
        if not self._cache.has_room(chain, num_blocks):
            return False
        seq.hold = self._cache.take(chain, num_blocks)
        seq.num_left = seq.length - seq.hold.num_found * self._info.block_size
        insort(self._prefilling, seq, key=_turn)
        return True

    # -- working ---------------------------------------------------------------------------------------------

    def begin(self, now: float) -> float | None:
        if self._cancelled:
            self._drop_cancelled()
        chunks = self._chunks()
        rows = len(self._decoding) + len(chunks)
        if not rows:
            self._stretch = None
            return now if self._events else None
        context, tokens = self._context + len(self._decoding), len(self._decoding)
        for seq, count in chunks:
            tokens += count
            context += seq.length - seq.num_left + count
        first = self._cost.seconds(rows, tokens, context)
        num_steps = 1 if chunks else self._decoding[0][0] - self._step
        self._stretch = _Stretch(now, num_steps, first, self._cost.context * len(self._decoding), chunks)
        return now + self._stretch.seconds(num_steps)

    def _chunks(self) -> list[tuple[_Sequence, int]]:
        """Return the prompt chunks of the next step: first prompts that have begun, then waiting prompts as far as they
        fit."""
        budget = self._info.max_num_batched_tokens - len(self._decoding)
        chunks = []
        for seq in self._prefilling:
            count = max(min(seq.num_left, budget), 1)
            chunks.append((seq, count))
            budget -= count
        while budget > 0 and self._waiting and self._num_running < self._info.max_num_seqs:
            seq = self._waiting[0]
            if not self._admit(seq):
                break
            del self._waiting[0]
            count = min(seq.num_left, budget)
            chunks.append((seq, count))
            budget -= count
        return chunks

    @property
    def _num_running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    def shorten(self, now: float) -> float | None:
        stretch = self._stretch
        if stretch is None or stretch.num_steps == 1:
            return None
        stretch.num_steps = stretch.steps_by(now)
        return max(stretch.began + stretch.seconds(stretch.num_steps), now)

    def finish(self) -> list[WireEvent]:
        stretch = self._stretch
        if stretch is not None:
            self._stretch = None
            self._advance(stretch)
        events, self._events = self._events, []
        return events

    def _advance(self, stretch: _Stretch) -> None:
        num_decoded = len(self._decoding) * stretch.num_steps
        self._step += stretch.num_steps
        self._context += num_decoded
        self._work.busy_seconds += stretch.seconds(stretch.num_steps)
        self._work.num_steps += stretch.num_steps
        self._work.num_tokens += num_decoded
        for seq, count in stretch.chunks:
            self._work.num_tokens += count
            seq.num_left -= count
            if seq.num_left == 0:
                self._begin_decoding(seq)
        while self._decoding and self._decoding[0][0] <= self._step:
            self._end(heapq.heappop(self._decoding)[2], FinishReason.LENGTH)

    def _begin_decoding(self, seq: _Sequence) -> None:
        """Record that the sequence's prompt is computed and its first token sampled."""
        assert seq.hold is not None
        self._prefilling.remove(seq)
        self._cache.fill(seq.hold, self._chain(seq, seq.length))
        self._context += seq.length
        seq.last_step = self._step + seq.num_to_come - 1
        self._order += 1
        heapq.heappush(self._decoding, (seq.last_step, self._order, seq))
        if not seq.num_before:
            cached = seq.hold.num_found * self._info.block_size
            self._events.append(pack_event(PromptEvent(seq.request.id, 0, num_cached=cached)))
        self._tell(seq, seq.num_before, seq.num_before + 1)

    # -- going -----------------------------------------------------------------------------------------------

    def _end(self, seq: _Sequence, reason: FinishReason) -> None:
        """Remove a finished sequence from the decoding, prefilling or waiting sequences."""
        del self._live[seq.request.id]
        if seq.hold is not None:
            if seq.num_left == 0:
                total = seq.length + self._num_drawn(seq)
                self._context -= total - 1
                self._cache.fill(seq.hold, self._chain(seq, total - 1))
            self._cache.release(seq.hold)
        cached = seq.hold.num_found * self._info.block_size if seq.hold and not seq.num_before else 0
        usage = Usage(len(seq.request.prompt), cached, seq.num_before + self._num_drawn(seq))
        self._events.append(pack_event(Finished(seq.request.id, 0, reason, usage)))

    def _num_drawn(self, seq: _Sequence) -> int:
        """Return the number of the sequence's tokens that were sampled on this replica."""
        if seq.hold is None or seq.num_left:
            return 0
        return seq.num_to_come - (seq.last_step - self._step)

    def _drop_cancelled(self) -> None:
        cancelled, self._cancelled = self._cancelled, []
        for seq in cancelled:
            if self._live.get(seq.request.id) is not seq:
                continue
            self._waiting = [each for each in self._waiting if each is not seq]
            self._prefilling = [each for each in self._prefilling if each is not seq]
            self._decoding = [item for item in self._decoding if item[2] is not seq]
            heapq.heapify(self._decoding)
            self._end(seq, FinishReason.CANCELLED)

    def leave(self, now: float) -> list[WireEvent]:
        """Return the tokens of all finished steps, which the clients have received before the replica is lost."""
        if self._stretch is not None:
            done = self._stretch.steps_by(now) - 1
            self._step += done
            self._work.busy_seconds += now - self._stretch.began
            self._work.num_steps += done
            self._work.num_tokens += done * len(self._decoding)
        self._events = []
        for _, _, seq in self._decoding:
            self._tell(seq, seq.num_before + 1, seq.num_before + self._num_drawn(seq))
        return self._events

    def _tell(self, seq: _Sequence, first: int, end: int) -> None:
        key = root_key(seq.turn.seed)
        self._events += [pack_event(TokenEvent(seq.request.id, 0, drawn_token(key, i))) for i in range(first, end)]


def _turn(seq: _Sequence) -> float:
    """Return the position of a sequence in the waiting order."""
    return seq.request.place
