"""One output with several controllers: the tokens that each was shown, the decision of each, and their joint decision.

Each controller is asked as if it were the only one. The forced tokens of a controller are its *script*. Scripts are
shown to the other controllers one by one, checked against their masks, and then applied. So the others may have been
shown tokens that the engine has not applied yet (`shown`). The owner of a script is asked again once the whole script
was applied. This module sends nothing; `composite_pool.py` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bridle.controllers import composition
from bridle.controllers.composite_member import CompositeMember, num_same
from bridle.engine.control.decision import DRAW, Branch, Decision, Splice
from bridle.engine.interfaces import Answer, Ask, ControllerPool, StoredValue
from bridle.errors import ControllerError

#: Maximum number of forced tokens that are shown before they are applied.
_MAX_SHOWN = 64

Piece = tuple[int, tuple[int, ...]]


@dataclass(slots=True, eq=False)
class CompositeSequence:
    """One output. `length` is the number of the output's tokens, including those that were shown but not applied yet.
    `ways` is the last answer to the engine if that was to sample or to fork. `expected` is the expected report after a
    rewind. After a sample that `is_plain`, only the token must be reported, and all members are asked at once.
    `is_usual` is true as long as all members just sample; one of them may have a `wish` for other parameters. The first
    `num_demands` members are an operator's controllers."""

    names: Sequence[str]
    vocabulary: int
    parts: list[CompositeMember]
    length: int
    shown: tuple[int, ...] = ()
    ways: list[tuple[composition.Way, ...]] = field(default_factory=list)
    counts: tuple[int, ...] = ()
    is_plain: bool = False
    is_usual: bool = False
    wish: Decision | None = None
    expected: Piece = (0, ())
    num_demands: int = 0
    num_asked: int = 0
    has_answers: bool = False
    is_owed: bool = False
    is_final: bool = False
    turns_due: int = 1
    turns: int = 1
    log: str = ""
    stored: tuple[StoredValue, ...] = ()
    # scales of control vectors that come with the next forced tokens
    scales: dict[str, float] = field(default_factory=dict)

    # -- reports of the engine ---------------------------------------------------------------------------

    def fork(self, ask: Ask, ids: Sequence[int]) -> CompositeSequence:
        """Return the output that `ask` introduces: a copy of this output's current state."""
        numbers = composition.branch_numbers(self.counts, ask.branch or 0)
        parts = []
        for part, part_id, number in zip(self.parts, ids, numbers, strict=True):
            part.is_forked = True
            news = part.untold or Ask(part.id)
            born = replace(news, seq_id=part_id, parent=part.id, branch=number, index=ask.index)
            parts.append(
                CompositeMember(part_id, part.pool, part.is_lenient, part.may_go, untold=born, ahead=part.ahead)
            )
        return CompositeSequence(
            self.names, self.vocabulary, parts, self.length, ways=self._last_ways(), num_demands=self.num_demands
        )

    def ask_on(self, ask: Ask, asks: Mapping[ControllerPool, list[Ask]]) -> None:
        """Record the token of a plain sample, and add the asks that report it."""
        self.ways, self.is_plain, self.is_owed, self.turns_due, self.turns = [], False, True, 1, 1
        self.is_usual, self.wish = True, None
        self.length += len(ask.tokens)
        self.num_asked = len(self.parts)
        for part in self.parts:
            part.decision, part.is_asked = None, True
            asks[part.pool].append(Ask(part.id, ask.tokens, 0, ask.sampled))

    def report(self, ask: Ask) -> None:
        """Record the engine's report: the result of the last answer."""
        self.is_owed, self.is_final, self.turns_due, self.turns = True, ask.final, ask.turns, 1
        ways, self.ways, self.is_plain, self.is_usual = self._last_ways(), [], False, False
        if not ways or ask.final:
            self._follow(ask)
            return
        way = ways[(ask.branch or 0) % len(ways)]
        self.length += len(ask.tokens) - ask.backtrack
        if any(isinstance(each, Splice) for each in way):
            self._begin_scripts(way, ask)
        else:
            self._take_draw(way, ask)

    def _follow(self, ask: Ask) -> None:
        """Compare the report with the shown or expected tokens. If they differ, because the engine rolled tokens back
        by itself, all scripts are dropped. If a policy has only replaced a part of the text, the scripts continue."""
        shown, expected = self.shown, self.expected
        self.shown, self.expected = (), (0, ())
        same = 0 if ask.backtrack else num_same(shown, ask.tokens)
        backtrack, tokens = ask.backtrack + len(shown) - same, ask.tokens[same:]
        self.length += len(tokens) - backtrack
        if backtrack or tokens:
            self._move_all(backtrack, tokens, ask)
            if (backtrack, tokens) != expected and not ask.rewritten_by:
                for part in self.parts:
                    part.script = None
                    if part.untold is not None:  # a sampled token that was not reported to it is gone
                        part.untold = replace(part.untold, sampled=ask.sampled, candidates=ask.candidates)
        for part in self.parts:
            if part.decision is not None and _rests(part.decision):
                part.decision = None  # the member is asked again

    def _move_all(self, backtrack: int, tokens: tuple[int, ...], ask: Ask) -> None:
        for part in self.parts:
            part.move(backtrack, tokens, ask.sampled, ask.candidates, ask.changes, ask.probes)

    def _take_draw(self, way: Sequence[composition.Way], ask: Ask) -> None:
        """Report a sampled token to all members. If it triggers a splice, the forced part of the splice becomes the
        script of its owner."""
        wanted: list[tuple[int, Splice]] = []
        for number, (part, branch) in enumerate(zip(self.parts, way, strict=True)):
            assert isinstance(branch, Branch)
            top = ask.candidates[: branch.top_logprobs] if ask.candidates and branch.top_logprobs else None
            part.move(ask.backtrack, ask.tokens, ask.sampled, top, ask.changes, ask.probes)
            part.decision = None
            if branch.splices and ask.sampled is not None:
                splice = composition.matching(branch, ask.sampled)
                if splice is not None and (splice.backtrack or splice.ff_tokens):
                    wanted.append((number, splice))
        if wanted:
            self._begin_wanted(way, ask, wanted)

    def _begin_wanted(self, way: Sequence[composition.Way], ask: Ask, wanted: Sequence[tuple[int, Splice]]) -> None:
        first, splice = wanted[0]
        for number, other in wanted[1:]:
            if (other.backtrack, other.ff_tokens) != (splice.backtrack, splice.ff_tokens):
                raise self._clash(-len(ask.tokens)).between(
                    first, number, f"after token {ask.sampled}, the two controllers force different tokens"
                )
        taken = 0 if ask.tokens or ask.rewritten_by else ask.backtrack + 1  # including the sampled token
        rest = composition.rest_of(Splice(splice.backtrack, splice.ff_tokens), (taken, ()))
        if rest is None:
            return
        owners = {number for number, _ in wanted}
        for number, (part, branch) in enumerate(zip(self.parts, way, strict=True)):
            if number in owners:
                part.script = rest
            elif not (ask.tokens or ask.backtrack) and isinstance(branch, Branch):
                part.decision = Decision((branch,))  # no token came yet: its mask here applies to forced tokens

    def _begin_scripts(self, way: Sequence[composition.Way], ask: Ask) -> None:
        """Continue one branch of a fork with forced tokens. The first piece was already applied."""
        piece = composition.piece_of(way, self._clash())
        is_applied = piece == (ask.backtrack, ask.tokens) or bool(ask.rewritten_by)
        for part, each in zip(self.parts, way, strict=True):
            part.move(ask.backtrack, ask.tokens, changes=ask.changes)
            if isinstance(each, Splice):
                part.decision, part.script = None, composition.rest_of(each, piece) if is_applied else None
            else:
                part.decision = Decision((each,))

    # -- answers of the controllers ----------------------------------------------------------------------

    def next_asks(self) -> Iterator[tuple[ControllerPool, Ask]]:
        """Yield the asks that must be sent now, each with its pool."""
        for part in self.parts:
            if self.is_final or part.is_due:
                self.num_asked += not part.is_asked
                yield part.pool, part.next_ask(self.turns_due, self.is_final)

    def note_draw(self, number: int, answer: Answer) -> bool:
        """Record an answer that just samples; at most one may change the sampling parameters. Returns whether the
        answer is of this kind. Most answers are of this kind, so this is a fast path; `note_answer` and `advance` have
        the same result."""
        decision = answer.decision
        if not self.is_usual or decision is None or answer.log or answer.stored or answer.turns > 1:
            return False
        if decision is not DRAW:
            branches = decision.branches
            if len(branches) != 1 or not branches[0].sample or branches[0].splices:
                return False
            if composition.is_wish(branches[0]):
                if self.wish is not None:
                    return False
                self.wish = decision
        part = self.parts[number]
        self.num_asked -= part.is_asked
        part.decision, part.is_asked = decision, False
        return True

    def draw_together(self, last: Answer) -> Answer:
        """Return the answer for the engine when all members have answered and `note_draw` accepted all answers. `last`
        is the last answer."""
        self.ways, self.counts, self.is_plain = [], (1,) * len(self.parts), True
        self.is_usual = self.is_owed = False
        wish = self.wish
        return last if wish is last.decision else Answer(DRAW if wish is None else wish)

    def _last_ways(self) -> list[tuple[composition.Way, ...]]:
        """Return the engine's last answer if it was to sample or to fork, else an empty list."""
        if self.ways or not self.is_plain:
            return self.ways
        return [tuple(part.decision.branches[0] for part in self.parts if part.decision is not None)]

    def note_answer(self, number: int, answer: Answer) -> None:
        """Record the answer of one controller. Raises its error."""
        self.is_usual = False
        part = self.parts[number]
        self.num_asked -= part.is_asked
        part.is_asked = False
        if part.script is not None and not self.is_final:
            part.answer, self.has_answers = answer, True
        elif answer.log or answer.stored:
            self._print(answer)
        if self.is_final:
            return
        if answer.error is not None:
            raise answer.error
        decision = answer.decision
        assert decision is not None
        if answer.turns > self.turns:
            self.turns = answer.turns
        branches = decision.branches
        is_draw = len(branches) == 1 and branches[0].sample
        if not is_draw and decision.is_forced and not (part.untold or part.script or decision.is_noop):
            splice = branches[0].splices[0]
            part.script = Splice(splice.backtrack, splice.ff_tokens)
            self.scales |= branches[0].control_vectors or {}
        else:
            part.decision = decision

    # -- the joint decision ------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Return whether a required answer is missing."""
        if not self.num_asked:
            return False
        return any(part.is_asked and (self.is_final or part.script is None) for part in self.parts)

    def with_scales(self, decision: Decision) -> Decision:
        """Return a joint decision, with the control-vector scales that members set together with forced tokens."""
        scales, self.scales = self.scales, {}
        if not scales:
            return decision
        branches = (
            replace(each, control_vectors=scales | dict(each.control_vectors or {})) for each in decision.branches
        )
        return replace(decision, branches=tuple(branches))

    def advance(self) -> Decision | None:
        """Return the joint decision, or None if members have to be asked first because one more token was shown to
        them. Raises `ControllerError` if their decisions conflict. Must not be called while `is_waiting`."""
        branches: list[Branch] = []
        for part in self.parts:
            decision = part.decision
            if part.script is not None or decision is None or len(decision.branches) != 1 or self.shown:
                return self._advance_unlike()
            if not decision.branches[0].sample:
                return self._advance_unlike()
            branches.append(decision.branches[0])
        return self._draw(branches)

    def _draw(self, branches: list[Branch]) -> Decision:
        self.ways, self.counts = [tuple(branches)], (1,) * len(branches)
        self.is_plain, wish, num_wishes = True, 0, 0
        for number, branch in enumerate(branches):
            if branch.splices or self.parts[number].untold is not None:
                self.is_plain = False
            if composition.is_wish(branch):
                wish, num_wishes = number, num_wishes + 1
        decision = self.parts[wish].decision
        if num_wishes < 2 and decision is not None and not branches[wish].splices:
            return decision
        return Decision((composition.draw_of(branches, self.vocabulary, self._clash()),))

    def _advance_unlike(self) -> Decision | None:
        """Return the joint decision if not all members want to sample."""
        free = [part.decision for part in self.parts if part.script is None and part.decision is not None]
        is_forced = len(free) < len(self.parts)
        is_calm = all(decision.is_draw and len(decision.branches) == 1 for decision in free)
        if self.shown and not (is_forced and is_calm):
            return Decision.splice(0, self.shown)
        if is_calm:
            return self._show()
        for decision in free:
            if decision.is_stop:
                return Decision.stop(decision.reason)
        waits = [decision for decision in free if _rests(decision)]
        return _waiting(waits) if waits else self._fork()

    def _show(self) -> Decision | None:
        """Show the next forced token, or the rewind before it, to all members."""
        try:
            piece = composition.piece_of([self._next(part) for part in self.parts], self._clash())
        except ControllerError:
            if not any([part.relent() for part in self.parts]):  # noqa: C419 - all members that can
                raise
            return None
        backtrack, tokens = piece
        for part in self.parts:
            if part.script is not None:
                part.script = composition.rest_of(part.script, piece)
        if backtrack:
            self.expected = piece
            return Decision.splice(backtrack, ())
        self.shown += tokens
        self.length += 1
        for part in self.parts:
            part.move(0, tokens)
        is_over = all(part.script is None for part in self.parts)
        return Decision.splice(0, self.shown) if is_over or len(self.shown) >= _MAX_SHOWN else None

    def _fork(self) -> Decision | None:
        """Return the decision with every combination of the members' branches."""
        if any(part.is_asked for part in self.parts):
            return None
        options = [list(_ways(part)) for part in self.parts]
        self.ways, self.counts = composition.all_ways(options), tuple(map(len, options))
        return Decision.fork(self._branch(way) for way in self.ways)

    def _branch(self, way: Sequence[composition.Way]) -> Branch:
        draws = [each for each in way if isinstance(each, Branch)]
        if len(draws) == len(way):
            return composition.draw_of(draws, self.vocabulary, self._clash())
        return Branch(sample=False, splices=(Splice(*composition.piece_of(way, self._clash())),))

    def _next(self, part: CompositeMember) -> composition.Way:
        """Return a member's script or its only branch."""
        if part.script is not None:
            return part.script
        assert part.decision is not None
        return part.decision.branches[0]

    def _clash(self, before: int = 0) -> composition.DecisionConflict:
        return composition.DecisionConflict(self.names, self.length + before, self.num_demands)

    def answer(self, decision: Decision | None) -> Answer:
        """Return the answer for the engine, with the logs and variables of the controllers."""
        for part in self.parts if self.has_answers else ():
            if part.answer is not None and part.script is None and not (self.shown or self.is_final):
                self._print(part.answer)
                part.answer = None
        answer = Answer(decision, log=self.log, stored=self.stored, turns=self.turns)
        self.log, self.stored, self.is_owed = "", (), False
        return answer

    def _print(self, answer: Answer) -> None:
        self.log, self.stored = self.log + answer.log, self.stored + answer.stored

    def failure(self, error: ControllerError) -> Answer:
        """Return the answer that ends the output with an error."""
        answer = self.answer(None)
        answer.error = error
        return answer


def _ways(part: CompositeMember) -> Iterator[composition.Way]:
    """Yield a member's possible continuations: its script, or each branch of its fork."""
    if part.script is not None:
        yield part.script
    elif part.decision is not None:
        for branch in part.decision.branches:
            splices = branch.splices
            yield branch if branch.sample else Splice(splices[0].backtrack, splices[0].ff_tokens)


def _rests(decision: Decision) -> bool:
    return decision.is_wait or decision.is_noop


def _waiting(resting: Sequence[Decision]) -> Decision:
    """Return the joint wait, which ends when all waits have ended. Waits for variables are named, because only these
    variables can end them. If all wait for outside events, one of these events must happen first."""
    if all(decision.awaited for decision in resting):
        return Decision.wait_for(*(each for decision in resting for each in decision.awaited))
    waits = [decision.waits_for for decision in resting]
    named = next((each for each in waits if each), None)
    return Decision.wait(named if named is not None else None if None in waits else ())
