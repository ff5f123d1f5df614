"""Validation of controllers' decisions: the masks, tokens and splices that a sequence supports.

A decision is checked when it is predicted, and again when it is applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bridle.engine.control.decision import MAX_PROPOSED, Branch, Decision, Options, mask_words
from bridle.engine.multimodal.multimodal_inputs import splits
from bridle.engine.sampling.padded_vocab import NONE_UNNAMED, PaddedVocab
from bridle.engine.sequence import Sequence
from bridle.errors import BridleError, ControllerError, InvalidRequest
from bridle.safe_repr import short_repr
from bridle.sampling import MAX_LOGPROBS
from bridle.sampling_values import MAX_OPTION_TOKENS, check_scales


@dataclass(frozen=True, slots=True)
class DecisionValidator:
    """Checks decisions for a model whose vocabulary has `vocab_size` ids. Ids in `unnamed` have no token and are never
    sampled."""

    vocab_size: int
    unnamed: PaddedVocab = NONE_UNNAMED

    def problem(self, seq: Sequence, decision: Decision, num_ahead: int = 0) -> BridleError | None:
        """Return why `decision` would be invalid after earlier decisions that are not applied yet; None if it is
        valid."""
        num_moves = seq.control.num_moves + num_ahead
        try:
            if num_moves >= seq.control.max_moves:
                raise ControllerError(
                    f"the controller made {num_moves} decisions for this output, which is the limit, and the output "
                    "has not ended"
                )
            for branch in decision.branches:
                self._check_branch(seq, branch)
            if decision.options is not None:
                self._check_options(seq, decision.options, decision.branches)
        except BridleError as error:
            return error
        except (TypeError, ValueError, AttributeError) as error:
            return ControllerError(f"the decision is malformed: {error}")
        return None

    def _check_options(self, seq: Sequence, options: Options, branches: tuple[Branch, ...]) -> None:
        if len(branches) != 1 or branches[0].splices or not branches[0].sample:
            raise ControllerError(
                "a decision with a choice needs exactly one branch; the branch must sample and have no splices"
            )
        if not options.tokens or not all(options.tokens):
            raise ControllerError("a choice needs options, each with at least one token")
        if len(set(options.tokens)) < len(options.tokens):
            raise ControllerError("a choice has the same option twice")
        room = seq.max_len - len(seq.tokens)
        if branches[0].mask is None and options.longest > room:
            raise InvalidRequest(
                f"choice: got an option of {options.longest} tokens; max_tokens and the context leave room for {room}. "
                "Shorten the options or the prompt.",
                "choice",
            )
        num_tokens = sum(map(len, options.tokens))
        if num_tokens > MAX_OPTION_TOKENS:
            raise ControllerError(
                f"the options of a choice have {num_tokens} tokens in all; at most {MAX_OPTION_TOKENS}"
            )
        for tokens in options.tokens:
            for token in tokens:
                self._check_token(token, "options")

    def _check_branch(self, seq: Sequence, branch: Branch) -> None:
        if branch.mask is not None:
            num_bytes = 4 * mask_words(self.vocab_size)
            if len(branch.mask) != num_bytes:
                raise ControllerError(
                    f"the mask has {len(branch.mask)} bytes; a vocabulary of {self.vocab_size} tokens needs "
                    f"{num_bytes} bytes"
                )
            if self.unnamed.bar(branch.mask, self.vocab_size):
                raise ControllerError("the mask allows no token")
        if not 0 <= branch.top_logprobs <= MAX_LOGPROBS:
            raise ControllerError(f"top_logprobs is {branch.top_logprobs}; must be between 0 and {MAX_LOGPROBS}")
        if len(branch.draft) > MAX_PROPOSED:
            raise ControllerError(f"the draft has {len(branch.draft)} tokens; at most {MAX_PROPOSED}")
        for token in branch.draft:
            self._check_token(token, "draft")
        if branch.control_vectors is not None:
            _check_scales(seq, branch.control_vectors)
        for token, addend in branch.bias:
            self._check_token(token, "bias")
            if not addend < float("inf"):
                raise ControllerError(f"the bias of token {token} is {addend}; must be a number less than infinity")
        if not branch.sample and (len(branch.splices) != 1 or branch.splices[0].when_sampled):
            raise ControllerError("a branch that does not sample needs exactly one splice without when_sampled")
        for splice in branch.splices:
            if splice.backtrack < 0:
                raise ControllerError(f"backtrack is {splice.backtrack}; must not be negative")
            self._check_splice(seq, splice.backtrack - branch.sample, splice.ff_tokens)

    def _check_splice(self, seq: Sequence, backtrack: int, tokens: tuple[int, ...]) -> None:
        if backtrack > 0 and backtrack > len(seq.tokens) - (not tokens):
            raise ControllerError(
                f"a splice removes {backtrack} tokens and appends {len(tokens)}; the sequence has {len(seq.tokens)} "
                "tokens and must keep at least one"
            )
        if seq.runs and splits(seq.runs, len(seq.tokens) - backtrack):
            raise ControllerError(
                f"a splice removes {backtrack} tokens, which include a part of an image, or of a prompt whose tokens "
                "attend to later ones"
            )
        for token in tokens:
            self._check_token(token, "ff_tokens")

    def _check_token(self, token: int, where: str) -> None:
        if not 0 <= token < self.vocab_size:
            raise ControllerError(f"{where} has token {token}; the vocabulary has {self.vocab_size} tokens")


def _check_scales(seq: Sequence, scales: Mapping[str, float]) -> None:
    known = seq.sampling.control_vectors
    for name in scales:
        if name not in known:
            raise ControllerError(
                f"control_vectors: got {short_repr(name)}; a controller scales vectors that its request names, "
                f"which are {', '.join(map(repr, known)) or 'none'}. Add it to the request, with scale 0 to begin with."
            )
    check_scales(scales)
