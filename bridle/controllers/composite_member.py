"""One of several controllers on one output: the tokens that it was shown, and its decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bridle.engine.control.decision import Decision, Splice
from bridle.engine.interfaces import Answer, Ask, Change, ControllerPool

Candidates = tuple[tuple[int, float], ...] | None


@dataclass(slots=True, eq=False)
class CompositeMember:
    """One of the controllers on one output.

    `untold` are changes that the member was not shown yet. `ahead` are tokens that it was shown before the other
    members. While it has a `script` (forced tokens), it is not asked, and its `answer` is not sent, because alone it
    would not have been asked yet. A member that `is_lenient` can be asked for alternatives if others do not allow its
    forced tokens. A member that `may_go` is dropped if it fails; the output continues without it. After a fork,
    `is_forked` is set. The member is then asked in the same step as its copies, because a runtime forks only a
    controller that it is asked about.
    """

    id: int
    pool: ControllerPool
    is_lenient: bool = False
    may_go: bool = False
    has_relented: bool = False
    decision: Decision | None = None
    script: Splice | None = None
    is_asked: bool = False
    is_forked: bool = False
    untold: Ask | None = None
    ahead: tuple[int, ...] = ()
    answer: Answer | None = None

    def move(
        self,
        backtrack: int,
        tokens: tuple[int, ...],
        sampled: int | None = None,
        top: Candidates = None,
        changes: tuple[Change, ...] = (),
        probes: tuple[float, ...] = (),
    ) -> None:
        """Record that tokens were removed and added."""
        self.has_relented = False
        if self.ahead:
            same = 0 if backtrack else num_same(self.ahead, tokens)
            backtrack += 0 if same == len(tokens) and not backtrack else len(self.ahead) - same
            self.ahead, tokens = () if backtrack else self.ahead[same:], tokens[same:]
            if not (backtrack or tokens):
                return
        news = self.untold
        if news is None:
            self.untold = Ask(self.id, tokens, backtrack, sampled, top, changes=changes, probes=probes)
            return
        kept = news.tokens[: max(len(news.tokens) - backtrack, 0)]
        further = max(backtrack - len(news.tokens), 0)
        if sampled is None:
            sampled, top, probes = news.sampled, news.candidates, news.probes
        self.untold = replace(
            news,
            tokens=kept + tokens,
            backtrack=news.backtrack + further,
            sampled=sampled,
            candidates=top,
            changes=news.changes + changes,
            probes=probes,
        )

    @property
    def is_due(self) -> bool:
        """Return whether the member has to be asked now."""
        news = self.untold
        if self.is_asked or (news is None and self.decision is not None and not self.is_forked):
            return False
        if news is not None and news.parent is not None:
            return True
        return self.script is None and (
            self.is_forked or self.decision is None or (news is not None and bool(news.tokens or news.backtrack))
        )

    def relent(self) -> bool:
        """Drop the member's forced tokens, so that it is asked for alternatives. Returns whether the member had forced
        tokens."""
        if self.script is None or self.has_relented or not self.is_lenient:
            return False
        self.script, self.has_relented = None, True
        return True

    def next_ask(self, turns: int, final: bool) -> Ask:
        """Return the next ask of the member. A fork with a script is shown the whole script, as if there were no other
        controllers."""
        if self.script is not None and not final and not self.ahead:
            self.move(0, self.script.ff_tokens)
            self.ahead = self.script.ff_tokens
        ask = self.untold or Ask(self.id)
        if final or turns > 1 or self.has_relented:
            ask = replace(ask, final=final, turns=turns, may_force=not self.has_relented)
        self.untold, self.decision, self.is_asked, self.is_forked = None, None, True, False
        return ask


def num_same(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
