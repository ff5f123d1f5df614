"""What steers: what the engine asks about a sequence, what it is answered, and who runs the controllers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeGuard, runtime_checkable

from bridle.engine.control.decision import Decision
from bridle.engine.request import Request
from bridle.errors import ControllerError


class Change(NamedTuple):
    """Tokens that were drawn or forced, and are not what was decided: from place `start` on, `num_removed` of them went
    and `num_added` others came, put there by `policy`. It is empty if another way is to be taken. Places count from the
    start of the sequence, in the text as the changes before have left it, with all that was still to be forced."""

    start: int
    num_removed: int
    num_added: int = 0
    policy: str = ""


@dataclass(slots=True)  # not frozen, since one is made for each token; nobody changes it
class Ask:
    """Tokens of a sequence just became known: what next?

    `tokens` were appended after `backtrack` older ones were taken back; `sampled` is the token that was drawn, even if
    a splice replaced it; `candidates` are the likeliest tokens of that draw with their log-probabilities, if its branch
    wanted them. The first ask of a request names `request`, that of a fork its `parent` (which is in the same call),
    its `branch` number, counted from 1, and its `index` among the request's outputs. The first `num_foreseen` of the
    tokens were drawn one after the other, each as the pool foresaw it after the one before. A `final` ask wants no
    decision, only last logs. `turns` is how often in a row a controller that does nothing may be asked at once. Where
    it may not force tokens, because another controller does not allow them, it is asked for what else it allows.
    `variables` are set before it is asked, where the pool of its kind has variables. `ahead` are tokens that are likely
    to be drawn next, for a pool that `is_told_ahead`. `changes` are what was done otherwise than it was decided,
    because the text may not be in an output.
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

    @property
    def rewritten_by(self) -> str:
        """The policy that has put another text in place of a part of what was drawn or forced, if all of the rest was
        done as it was decided."""
        return self.changes[-1].policy if self.changes else ""


class StoredValue(NamedTuple):
    """A shared variable that a controller wrote, or to which it appended `value`."""

    name: str
    value: bytes
    is_append: bool = False


@dataclass(slots=True)
class Answer:
    """The answer of a controller. Exactly one of `decision` and `error` is set, except for a final ask. `turns` is how
    often the controller was asked for it. `ahead` is for the pool itself: tokens that may come, and what it would
    answer after each."""

    decision: Decision | None = None
    error: ControllerError | None = None
    log: str = ""
    stored: tuple[StoredValue, ...] = ()
    turns: int = 1
    ahead: tuple[tuple[int, Answer], ...] = ()


class ControllerPool(Protocol):
    """Runs controllers of one kind. Called by the engine thread, except for `abandon`. No call but
    `collect` may block."""

    @property
    def is_busy(self) -> bool:
        """Whether the pool has messages to send or to receive although nothing was asked, so that `collect` must be
        called again. False, plainly, for a pool that never has."""
        raise NotImplementedError

    def accepts(self, controller: object) -> bool:
        """Whether this pool runs controllers of this kind."""
        raise NotImplementedError

    def open(self, request: Request) -> Future[tuple[int, ...]]:
        """Make an instance for a request. The future gives the prompt, which a controller may rewrite, or
        raises `ControllerError`. A future that could be cancelled leaves no instance behind."""
        raise NotImplementedError

    def abandon(self, request: Request) -> None:
        """Drop the instance that was opened for `request`, which will never be asked anything. Called after its opening
        is done, perhaps from another thread."""

    def ask(self, asks: Sequence[Ask]) -> None:
        """Send the asks. Callbacks may start now; the answers are due at the next logits row of each sequence."""

    def collect(self, seq_ids: Iterable[int], deadline: float | None) -> Mapping[int, Answer]:
        """The answers that have arrived, of any asked sequence. Waits until those of `seq_ids` are there, or until
        `deadline` (engine clock, None: do not wait) has passed. Each answer is returned once."""
        raise NotImplementedError

    def close(self, seq_ids: Sequence[int]) -> None:
        """Drop the instances of these sequences, which are over. Unknown ids are ignored."""

    def shutdown(self) -> None:
        """End all controllers, and what runs them. Idempotent."""


@runtime_checkable
class ModulePool(Protocol):
    """A `ControllerPool` whose controllers are modules with names, which may mean another module tomorrow."""

    def modules_of(self, request: Request) -> tuple[tuple[str, str], ...]:
        """The names by which a request's controllers were asked for, and the hashes of the modules that were made of
        them. Asked once its opening is done, and before it is first asked anything."""
        raise NotImplementedError


@runtime_checkable
class SupportsLookahead(Protocol):
    """A `ControllerPool` that can say ahead what it would answer, for controllers whose `is_pure`, if they have such an
    attribute, is true."""

    def lookahead(self, seq_id: int, tokens: Sequence[int]) -> list[Decision]:
        """What the controller would answer after each of `tokens`, if they came next: as far as these are draws, and
        quickly known. It may also force tokens that come next among them; then its next answer is that to the last of
        these. Nothing changes for the controller until tokens are reported as foreseen. Asked for a sequence whose last
        answer was collected."""
        raise NotImplementedError

    def take_lookahead_output(self, seq_id: int, num_tokens: int) -> Answer | None:
        """What the controller said beside what it answered ahead to the last of so many of the tokens, which were drawn
        now: log and variables. It is returned once; the answer to those tokens leaves it out."""


@runtime_checkable
class SupportsDraftMasks(SupportsLookahead, Protocol):
    """One that says before a step how drafts are to be drawn."""

    def draft_decision(self, seq_id: int, tokens: Sequence[int]) -> Decision | None:
        """What the controller would answer after all of `tokens`, if they came next; None if that is not quickly known.
        Nothing changes for the controller. While a draft is made it is asked after each of its tokens."""
        raise NotImplementedError


@runtime_checkable
class SupportsDraftFiltering(SupportsDraftMasks, Protocol):
    """One that says before a step which tokens may be drafted."""

    def filter_draft(self, seq_id: int, tokens: Sequence[int]) -> tuple[list[tuple[int, ...]], bool]:
        """Those of `tokens` that are allowed after one another, each with the tokens that are then forced, as far as
        draws follow; and whether others are forced than those that come next in `tokens`. Asked again, it goes on from
        there."""
        raise NotImplementedError


@runtime_checkable
class SupportsRemoteLookahead(SupportsLookahead, Protocol):
    """One that foresees only what it was told `ahead`, together with an ask: its controllers are far away."""

    @property
    def is_told_ahead(self) -> bool:
        """Whether it makes use of that now."""
        raise NotImplementedError


def supports_lookahead(pool: object) -> TypeGuard[SupportsLookahead]:
    """Whether a pool is one, at a glance: what `isinstance` finds out about protocols takes long beside a step."""
    return hasattr(pool, "lookahead")


def supports_draft_masks(pool: object) -> TypeGuard[SupportsDraftMasks]:
    """Whether a pool is one, at a glance."""
    return hasattr(pool, "draft_decision")


def supports_draft_filtering(pool: object) -> TypeGuard[SupportsDraftFiltering]:
    """Whether a pool is one, at a glance."""
    return hasattr(pool, "filter_draft")


def supports_remote_lookahead(pool: object) -> TypeGuard[SupportsRemoteLookahead]:
    """Whether a pool is one, at a glance."""
    return hasattr(pool, "is_told_ahead")
