"""State of one unfinished draft: how its next token is sampled, and the forced tokens so far.

A draft token is sampled like the real token at that position. A draft token has the same parameters, random key and
number as the real token, and the same bans of the request. The mask of a draft token is the mask that the controller
predicts after the tokens so far. Tokens that the controller forces become part of the draft. The draft ends where the
controller predicts nothing, because the next token could not be verified.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridle.engine.control.decision import Branch, Decision, mask_words
from bridle.engine.control.decision_validator import DecisionValidator
from bridle.engine.sampling.sample_rows import draw_row
from bridle.engine.scheduling.step_plan import SampleRow
from bridle.engine.sequence import Sequence

_PLAIN = Branch()


@dataclass(slots=True, eq=False)
class DraftStep:
    """A sequence that gets `left` more draft tokens. The vocabulary of the draft model has `vocab_size` ids. `own` has
    the tokens of the sequence and the draft tokens. `way` is the branch by which the next token is sampled."""

    seq: Sequence
    own: Sequence
    left: int
    way: Branch
    vocab_size: int
    num_drawn: int = 0
    num_tokens: int = 0  # tokens of the current forward pass

    def row(self, index: int) -> SampleRow:
        """Return the row that drafts a token from logits row `index`.

        Both models use the same random number between 0 and 1. The random number selects a token by cumulative
        probability, in the order of the vocabulary. So if the two distributions are equal, both models sample the same
        token, even at a high temperature. With independent random numbers, the tokens would agree only as often as two
        samples of one distribution.
        """
        drafted = self.drafted
        row = draw_row(self.seq, self.way, self.own.id, index, drafted, len(drafted), self.num_drawn)
        row.sampling, row.num_traced = self.own.sampling, 0
        if self.way.sampling is not None:
            row.sampling = self.way.sampling.with_(logprobs=None, prompt_logprobs=None)
        if row.bias:
            row.bias = tuple((token, addend) for token, addend in row.bias if token < self.vocab_size)
        if row.mask is not None:
            num_bytes = 4 * mask_words(self.vocab_size)
            row.mask = row.mask[:num_bytes].ljust(num_bytes, b"\0")
        return row

    @property
    def drafted(self) -> tuple[int, ...]:
        """Return the draft tokens so far."""
        return tuple(self.own.tokens[len(self.seq.tokens) :])

    def append(self, token: int, rules: DecisionValidator) -> bool:
        """Append a drafted token. Returns whether another draft token is needed after this one."""
        self.own.tokens.append(token)
        self.left -= 1
        self.num_drawn += 1
        return self.left > 0 and token not in self.seq.stop_ids and self._go_on(rules)

    def _go_on(self, rules: DecisionValidator) -> bool:
        """Append the tokens that the controller forces now, and find its decision's branch that samples the next draft
        token. Returns False if the controller has not decided about the next token."""
        pool = self.seq.control.pool
        if pool is None or "draft_masks" not in pool.capabilities:
            return True
        while len(self.own.tokens) < self.own.max_len:
            decision = pool.draft_decision(self.seq.id, self.drafted)
            if decision is None or rules.problem(self.seq, decision, self.num_drawn) is not None:
                return False
            if is_plain_draw(decision):
                self.way = decision.branches[0]
                return True
            if not self._force(decision):
                return False
        return False

    def _force(self, decision: Decision) -> bool:
        """Append forced tokens. Returns whether `decision` contains only forced tokens."""
        if not decision.is_forced or decision.branches[0].splices[0].backtrack:
            return False
        tokens = decision.branches[0].splices[0].ff_tokens
        if not tokens or max(tokens) >= self.vocab_size:
            return False
        self.own.tokens += tokens
        return True


def first_way(seq: Sequence, rules: DecisionValidator) -> Branch | None:
    """Return the branch by which the next token of `seq` is sampled. If the branch is unknown, or if drafts cannot be
    verified against it, the result is None."""
    pool, decision = seq.control.pool, seq.control.answer
    if pool is None:
        return _PLAIN
    if decision is None:
        if "draft_masks" not in pool.capabilities:
            return _PLAIN
        decision = pool.draft_decision(seq.id, ())
    if decision is None or not is_plain_draw(decision) or rules.problem(seq, decision) is not None:
        return None
    return decision.branches[0]


def is_plain_draw(decision: Decision) -> bool:
    """Return whether the decision only samples one token, without splices and options."""
    is_single = decision.is_draw and len(decision.branches) == 1 and decision.options is None
    return is_single and not decision.branches[0].splices
