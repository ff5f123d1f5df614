"""Interfaces of controllers: `Ask` messages about a sequence, answers, and the pools that run controllers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bridle.engine.control.decision import DRAW, Decision
from bridle.engine.request import Request
from bridle.errors import ControllerError


class Change(NamedTuple):
    """A change of tokens that a controller did not decide. At position `start`, `policy` removed `num_removed` tokens
    and added `num_added` tokens. If other tokens are to be sampled after the change, no tokens are added. Positions
    count from the start of the sequence, after earlier changes and including pending forced tokens."""

    start: int
    num_removed: int
    num_added: int = 0
    policy: str = ""


@dataclass(slots=True)  # not frozen, because one is made per token and that is faster; it is never changed
class Ask:
    """A call of a controller for a decision, because new tokens of its sequence are known.

    `backtrack` older tokens were rolled back, then `tokens` were appended. `sampled` is the token that was sampled,
    even if a splice replaced it. `candidates` are the most probable tokens at the position of `sampled` with their
    log-probabilities, if the branch requested them. The first `Ask` of a request has the request itself in `request`.
    The first `Ask` of a fork has the sequence id `parent` of the forked sequence and the `branch` number, counted from
    1. The `index` of a fork is its place among the request's outputs. The pool had predicted the first `num_foreseen`
    of the sampled tokens. An `Ask` that is `final` needs no decision, only the last logs. `turns` is the number of
    times in a row that the controller may be asked while it does nothing. With `may_force` False, another controller
    forbids forced tokens. The controller should then answer with a set of allowed tokens. `variables` are set before
    the controller is asked, if its pool supports variables. `ahead` are tokens that will probably be sampled next, for
    a pool that `is_told_ahead`. `changes` are tokens that a policy changed after the controller's decision. `probes`
    are the values of the request's probes at the position where `sampled` was sampled.
    """

    seq_id: int
    tokens: tuple[int, ...] = ()
    backtrack: int = 0
    sampled: int | None = None
    candidates: tuple[tuple[int, float], ...] | None = None
    request: Request | None = None
    parent: int | None = None
    branch: int | None = None
    index: int = 0
    final: bool = False
    turns: int = 1
    num_foreseen: int = 0
    may_force: bool = True
    variables: tuple[tuple[str, bytes], ...] = ()
    ahead: tuple[int, ...] = ()
    changes: tuple[Change, ...] = ()
    probes: tuple[float, ...] = ()

    @property
    def rewritten_by(self) -> str:
        """Return the name of the policy that replaced sampled or forced tokens, if all other tokens followed the
        decision. If other tokens do not follow the decision, return an empty string."""
        return self.changes[-1].policy if self.changes else ""


def ask_after(seq_id: int, token: int) -> Ask:
    """Return the `Ask` about a sequence whose only change is one newly sampled token."""
    return Ask(seq_id, (token,), 0, token)


class StoredValue(NamedTuple):
    """A write of a shared variable by a controller: it sets the variable to `value`, or appends `value`."""

    name: str
    value: bytes
    is_append: bool = False


@dataclass(slots=True)
class Answer:
    """The answer of a controller to an `Ask`. Exactly one of `decision` and `error` is set; in the answer to a final
    `Ask` both may be missing. `turns` is the number of times that the controller was asked for this answer. Only the
    pool itself reads `ahead`: possible next tokens, each with the controller's answer after that token."""

    decision: Decision | None = None
    error: ControllerError | None = None
    log: str = ""
    stored: tuple[StoredValue, ...] = ()
    turns: int = 1
    ahead: tuple[tuple[int, Answer], ...] = ()


#: Samples as usual, with nothing to report: the answer of most controllers in most steps. This object is never changed.
DRAWN = Answer(DRAW)


#: A further ability of a pool. `lookahead`: the pool predicts its answers to likely tokens (`lookahead`,
#: `take_lookahead_output`), for controllers whose `is_pure`, if they have it, is true. `remote_lookahead`: it predicts
#: only after tokens that came `ahead` with an ask, because its controllers are far away. `draft_masks`: it says how
#: draft tokens are sampled (`draft_decision`). `draft_filtering`: it says which tokens may be drafted (`filter_draft`).
#: `forced_text`: it says which tokens it would force after a token (`forced_after`).
Capability = Literal["lookahead", "remote_lookahead", "draft_masks", "draft_filtering", "forced_text"]


class ControllerPool(ABC):
    """Runs controllers of one kind. Only the engine's thread calls a pool, except for `abandon`. Only `collect` may
    block.

    `capabilities` names the optional methods that a pool implements; the engine calls no other optional methods.
    """

    capabilities: frozenset[Capability] = frozenset()
    answers_at_once: bool = False  # whether `ask` leaves all answers ready for `collect`

    @property
    def is_busy(self) -> bool:
        """Return True if `collect` must be called again although no sequence was asked about, because the pool has
        messages to send or receive."""
        return False

    @property
    def is_told_ahead(self) -> bool:
        """Return True if a pool with `remote_lookahead` currently uses the tokens in `ahead`."""
        return False

    @abstractmethod
    def accepts(self, controller: object) -> bool:
        """Return whether this pool runs controllers of this kind."""

    @abstractmethod
    def open(self, request: Request) -> Future[tuple[int, ...]]:
        """Create a controller instance for a request. The future returns the prompt, which a controller may rewrite, or
        it raises `ControllerError`. A cancelled future leaves no controller instance behind."""

    def modules_of(self, request: Request) -> tuple[tuple[str, str], ...]:
        """Return the names of a request's controllers, and the hashes of their modules. Called after the controller was
        created and before its first `Ask`."""
        return ()

    @abstractmethod
    def abandon(self, request: Request) -> None:
        """Drop the controller instance that was created for `request`. The engine has not asked this instance and never
        will. Called after the creation has ended, perhaps from another thread."""

    @abstractmethod
    def ask(self, asks: Sequence[Ask]) -> None:
        """Send the asks. The controllers may start to compute now. Each answer is due at the next logits row of its
        sequence."""

    def ask_sampled(self, tokens: Mapping[int, int]) -> None:
        """Ask the controllers about their sequences, in ascending order of the sequence ids. In each sequence the only
        change is one newly sampled token. A pool may override this method to work without an `Ask` object for each
        sequence."""
        self.ask([ask_after(seq_id, token) for seq_id, token in tokens.items()])

    @abstractmethod
    def collect(self, seq_ids: Iterable[int], deadline: float | None) -> Mapping[int, Answer]:
        """Return the answers that have been received, for any sequence that was asked about. Waits until the answers of
        `seq_ids` are received, or until `deadline` (engine clock, None: do not wait). Each answer is returned once."""

    def lookahead(self, seq_id: int, tokens: Sequence[int]) -> list[Decision]:
        """Return the controller's answers after each of `tokens`, as if each came next. Only answers that sample and
        that are known quickly are returned. If the controller forces tokens that are in `tokens`, its next answer is
        the one after the last forced token. The state of the controller does not change until tokens are reported as
        predicted. Called for a sequence whose last answer was already returned."""
        return []

    def take_lookahead_output(self, seq_id: int, num_tokens: int) -> Answer | None:
        """Return the log and variables of the answer that was predicted after the first `num_tokens` tokens, which have
        now been sampled. Each log and variable is returned once: the controller's later answer to the sampled tokens
        does not repeat it."""
        return None

    def draft_decision(self, seq_id: int, tokens: Sequence[int]) -> Decision | None:
        """Return the controller's answer after all of `tokens`, as if they came next; None if it is not known quickly.
        The state of the controller does not change. The pool is called after each new token of a draft, while the draft
        is made."""
        return None

    def filter_draft(self, seq_id: int, tokens: Sequence[int]) -> tuple[list[tuple[int, ...]], bool]:
        """Return the longest beginning of `tokens` whose tokens the controller allows. Each returned token has the
        tokens that are forced after it. The second result is True if the forced tokens differ from those that come next
        in `tokens`. A later call continues after the last allowed token."""
        return [], False

    def forced_after(self, seq_id: int, tokens: Sequence[int], limit: int) -> list[tuple[int, ...]]:
        """Return, for each of `tokens`, the tokens that the controller would force after it, at most `limit` of them.
        The state of the controller does not change. Called for a sequence whose last answer was already returned."""
        return [() for _ in tokens]

    @abstractmethod
    def close(self, seq_ids: Sequence[int]) -> None:
        """Drop the controller instances of sequences that have ended. Unknown ids are ignored."""

    @abstractmethod
    def shutdown(self) -> None:
        """Shut down all controllers and their runtime. Idempotent."""


class DelegatingPool(ControllerPool):
    """Passes every call to another pool. This wrapper is the base class of pools that change only some calls."""

    def __init__(self, pool: ControllerPool) -> None:
        self._pool = pool
        self.capabilities, self.answers_at_once = pool.capabilities, pool.answers_at_once

    @property
    def is_busy(self) -> bool:
        return self._pool.is_busy

    @property
    def is_told_ahead(self) -> bool:
        return self._pool.is_told_ahead

    def accepts(self, controller: object) -> bool:
        return self._pool.accepts(controller)

    def open(self, request: Request) -> Future[tuple[int, ...]]:
        return self._pool.open(request)

    def modules_of(self, request: Request) -> tuple[tuple[str, str], ...]:
        return self._pool.modules_of(request)

    def abandon(self, request: Request) -> None:
        self._pool.abandon(request)

    def ask(self, asks: Sequence[Ask]) -> None:
        self._pool.ask(asks)

    def ask_sampled(self, tokens: Mapping[int, int]) -> None:
        if type(self).ask is DelegatingPool.ask:
            self._pool.ask_sampled(tokens)
        else:
            super().ask_sampled(tokens)

    def collect(self, seq_ids: Iterable[int], deadline: float | None) -> Mapping[int, Answer]:
        return self._pool.collect(seq_ids, deadline)

    def lookahead(self, seq_id: int, tokens: Sequence[int]) -> list[Decision]:
        return self._pool.lookahead(seq_id, tokens)

    def take_lookahead_output(self, seq_id: int, num_tokens: int) -> Answer | None:
        return self._pool.take_lookahead_output(seq_id, num_tokens)

    def draft_decision(self, seq_id: int, tokens: Sequence[int]) -> Decision | None:
        return self._pool.draft_decision(seq_id, tokens)

    def filter_draft(self, seq_id: int, tokens: Sequence[int]) -> tuple[list[tuple[int, ...]], bool]:
        return self._pool.filter_draft(seq_id, tokens)

    def forced_after(self, seq_id: int, tokens: Sequence[int], limit: int) -> list[tuple[int, ...]]:
        return self._pool.forced_after(seq_id, tokens, limit)

    def close(self, seq_ids: Sequence[int]) -> None:
        self._pool.close(seq_ids)

    def shutdown(self) -> None:
        self._pool.shutdown()


def check_pools(pools: Iterable[object]) -> None:
    """Raise `TypeError` if the object is not a `ControllerPool`, for example because it was written for an earlier
    version."""
    for pool in pools:
        if not isinstance(pool, ControllerPool):
            raise TypeError(
                f"pools: got {type(pool).__name__}; a pool derives from bridle.engine.ControllerPool. Derive it, and"
                " list its optional methods in `capabilities`. Renamed: foresee is lookahead, take_words is"
                " take_lookahead_output, guide is draft_decision, lead is filter_draft"
            )
