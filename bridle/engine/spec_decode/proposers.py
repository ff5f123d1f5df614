"""Proposers of draft tokens: their interface, and the proposers that need no model.

A proposer is asked for draft tokens before each step, for many sequences at once. A proposer's guesses change only the
speed, because each guess is compared with the sampled token (`SamplePlanner`). `ControllerProposer` uses the proposal
of a controller. `NgramProposer` copies from the client's prediction and from the sequence itself. `DraftModelProposer`
in `draft_model` runs a smaller model.
"""

from __future__ import annotations

from collections.abc import Iterable

from bridle.engine.control.decision import MAX_PROPOSED, Decision
from bridle.engine.sequence import Sequence
from bridle.engine.sequence_state import Proposal
from bridle.engine.spec_decode.ngram_lookup import NgramIndex

#: Maximum number of tokens that are indexed in one step.
_MOST_INDEXED = 4096

#: A sequence, and the maximum number of tokens to draft for it.
Wish = tuple[Sequence, int]
#: Guessed tokens by sequence id; sequences without a guess are left out.
Drafts = dict[int, tuple[int, ...]]


class Proposer:
    """Guesses the next tokens of sequences. A proposer has data about each sequence. The data follows the tokens of the
    sequence, and is dropped with its KV."""

    def propose(self, wishes: Iterable[Wish]) -> Drafts:
        """Return guesses for the next tokens of each sequence."""
        raise NotImplementedError

    def seconds(self, num_sequences: int) -> float:
        """Return the seconds that one token for each sequence takes; 0 if this is negligible compared to a step."""
        return 0.0

    def seconds_behind(self, seq: Sequence) -> float:
        """Return the seconds until the proposer has processed all tokens of `seq`. Until then, the proposer guesses
        nothing."""
        return 0.0

    def cut(self, seq: Sequence) -> None:
        """Record that tokens of `seq` were rolled back."""

    def forget(self, seq: Sequence) -> None:
        """Drop the data about a sequence that has ended or was preempted."""

    def close(self) -> None:
        """Release the proposer's resources. Idempotent."""


class ControllerProposer(Proposer):
    """Drafts the tokens that a controller proposed, as long as they are right. The proposal is stored in the
    sequence."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def on_decision(self, seq: Sequence, decision: Decision) -> None:
        """Store the tokens that an answer proposes, up to the first invalid token. The answer is refused later because
        of that token. If the controller proposes nothing, its last proposal stays."""
        if len(decision.branches) != 1 or not decision.is_draw:
            return
        tokens = decision.branches[0].draft
        if not tokens or not isinstance(tokens, tuple):
            return
        tokens = tokens[:MAX_PROPOSED]
        known = next((i for i, token in enumerate(tokens) if not self._is_known(token)), len(tokens))
        seq.drafts.proposal = Proposal(len(seq.tokens), tokens[:known])

    def propose(self, wishes: Iterable[Wish]) -> Drafts:
        """Return the proposed tokens that are not used yet."""
        return {seq.id: tokens for seq, limit in wishes if (tokens := proposed(seq, limit))}

    def _is_known(self, token: object) -> bool:
        return isinstance(token, int) and 0 <= token < self._vocab_size

    def cut(self, seq: Sequence) -> None:
        """Drop a proposal that begins after the end of the sequence. If the removed tokens include part of the
        proposal, the proposal continues from the new end of the sequence."""
        proposal = seq.drafts.proposal
        if proposal is not None:
            proposal.num_true = min(proposal.num_true, len(seq.tokens) - proposal.at)
            if proposal.num_true < 0:
                seq.drafts.proposal = None


def proposed(seq: Sequence, limit: int) -> tuple[int, ...]:
    """Return at most `limit` tokens that the controller of `seq` has proposed to come next. A proposal that is wrong or
    completely used is dropped."""
    proposal, answer = seq.drafts.proposal, seq.control.answer
    if proposal is None or (answer is not None and (len(answer.branches) != 1 or not answer.is_draw)):
        return ()
    fresh = seq.tokens[proposal.at + proposal.num_true :]
    if fresh:
        if tuple(fresh) != proposal.tokens[proposal.num_true : proposal.num_true + len(fresh)]:
            seq.drafts.proposal = None
            return ()
        proposal.num_true += len(fresh)
    if proposal.num_true == len(proposal.tokens):
        seq.drafts.proposal = None
    return proposal.tokens[proposal.num_true : proposal.num_true + limit]


class NgramProposer(Proposer):
    """Drafts the tokens that followed an earlier occurrence of the last few tokens in the client's prediction, the
    prompt or the output."""

    def __init__(self) -> None:
        self._texts: dict[int, NgramIndex] = {}

    def propose(self, wishes: Iterable[Wish]) -> Drafts:
        """Draft copies for the sequences whose text is completely indexed."""
        found: Drafts = {}
        for seq, limit in wishes:
            text = self._texts.get(seq.id)
            if text is None:
                text = self._texts[seq.id] = NgramIndex(seq.sampling.prediction_ids[: seq.max_len])
            text.follow(seq.tokens, seq.num_prompt, _MOST_INDEXED)
            if len(text) == len(seq.tokens) and (tokens := text.draft(limit)):
                found[seq.id] = tokens
        return found

    def propose_after(self, seq: Sequence, tokens: Iterable[int], limit: int) -> tuple[int, ...]:
        """Continue a copy after tokens that may follow those of `seq`. `propose` must have been called for `seq` just
        before."""
        text = self._texts.get(seq.id)
        return () if text is None or limit <= 0 else text.draft_after(tokens, limit)

    def cut(self, seq: Sequence) -> None:
        """Remove the tokens that the sequence rolls back from the indexed text."""
        if seq.id in self._texts:
            self._texts[seq.id].cut(len(seq.tokens))

    def forget(self, seq: Sequence) -> None:
        """Drop the indexed text of a sequence when its KV is dropped."""
        self._texts.pop(seq.id, None)
