"""Lookahead of controllers: a controller answers about draft tokens before the draft tokens are sampled.

A controller in this process is asked for each draft token. A controller in another process gets the likely next tokens
together with a regular `Ask`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from bridle.engine.control.controller_output import ControllerOutputs
from bridle.engine.control.decision import DRAW, Branch
from bridle.engine.control.decision_validator import DecisionValidator
from bridle.engine.interfaces import Ask
from bridle.engine.outputs.output_processor import OutputProcessor
from bridle.engine.sequence import Sequence
from bridle.engine.spec_decode.speculation import Speculation

#: Branches of a sequence without a controller: sample one token.
PLAIN = DRAW.branches


@dataclass(eq=False, repr=False)
class ControllerLookahead:
    """Asks controllers of active `sequences` in advance; `rules` validates the predicted answers."""

    _sequences: Mapping[int, Sequence]
    _rules: DecisionValidator
    _words: ControllerOutputs
    _progress: OutputProcessor
    _speculation: Speculation
    _clock: Callable[[], float]

    def with_drafts(self, asks: list[Ask]) -> list[Ask]:
        """Return the `Ask` messages, with the tokens added that will probably be sampled next."""
        asked = [seq for ask in asks if not ask.final and (seq := self._sequences.get(ask.seq_id)) is not None]
        drafts = self._speculation.draft_for_remote_controllers(asked)
        if not drafts:
            return asks
        return [replace(ask, ahead=drafts[ask.seq_id]) if ask.seq_id in drafts else ask for ask in asks]

    def foresee(self, seq: Sequence, drafts: tuple[int, ...]) -> list[Branch]:
        """Return the branches that the controller of `seq` is predicted to choose along `drafts`, up to the first
        invalid answer. For each draft token, the result has a branch that says how the token is sampled or which tokens
        are forced. The last branch says how the sequence continues after the draft tokens."""
        pool = seq.control.pool
        if pool is None:
            return list(PLAIN * len(drafts))
        known: list[Branch] = []
        guessing = self._speculation.guessing
        began = guessing.timer()
        for decision in pool.lookahead(seq.id, drafts):
            if decision.options is not None or len(decision.branches) != 1:
                break
            if decision.branches[0].control_vectors is not None:
                break  # draft tokens after this branch were computed with other scales
            if self._rules.problem(seq, decision, len(known) + 1) is not None:
                break
            known.append(decision.branches[0])
        guessing.note_foreseen(seq, len(known), guessing.timer() - began)
        return known

    def tell(self, seq: Sequence, num_tokens: int) -> None:
        """Send the logs and variables of the predicted answer to `num_tokens` draft tokens, which are now confirmed."""
        words = seq.control.pool.take_lookahead_output(seq.id, num_tokens) if seq.control.pool is not None else None
        if words is not None and (words.log or words.stored):
            if seq.trace is not None:
                self._progress.tracer.heard(seq, words, self._clock())
            self._words.tell(seq, words)
